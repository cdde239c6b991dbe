"""``mempool demo``."""


def demo() -> None:
    """To come."""

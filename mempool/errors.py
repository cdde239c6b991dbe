"""The errors of the pool: few, and each a kind that people catch already."""

from __future__ import annotations


class MempoolError(Exception):
    """Base of the pool's own errors."""


class UsageError(MempoolError, RuntimeError):
    """A call that makes no sense now: nested iterations, a second install, an unknown setting."""


class OutOfMemoryError(MempoolError, MemoryError):
    """The device has no memory left, and neither has anything that the pool could give back.

    Attributes:
        asked_bytes: what was asked for.
        live_bytes: in use, by all that share the pool.
        reserved_bytes: held from the device.
        arena_bytes: of these, in the arena.
        limit_bytes: ``max_reserved``, or None.
    """

    def __init__(self, numbers: dict[str, int]) -> None:
        self.asked_bytes = numbers["asked_bytes"]
        self.live_bytes = numbers["live_bytes"]
        self.reserved_bytes = numbers["reserved_bytes"]
        self.arena_bytes = numbers["arena_bytes"]
        limit = numbers["limit_bytes"]
        self.limit_bytes = None if limit >= 2**63 else limit
        limited = "" if self.limit_bytes is None else f", limited to {self.limit_bytes:,}"
        super().__init__(
            f"out of memory: {self.asked_bytes:,} bytes asked for; {self.live_bytes:,} live, "
            f"{self.reserved_bytes:,} reserved ({self.arena_bytes:,} of them planned){limited}"
        )

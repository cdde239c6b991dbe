"""Versions of the frameworks that the tests have run on; docs/versions.md shows the same table."""

from __future__ import annotations

import sys
import warnings

#: Oldest and newest tested (major, minor) of each framework.
TESTED = {
    "cupy": ((13, 6), (14, 2)),
    "numpy": ((1, 26), (2, 5)),
    "torch": ((2, 11), (2, 13)),
    "numba": ((0, 68), (0, 68)),
    "rmm": ((26, 10), (26, 10)),
}
_warned: set[str] = set()


def warn_if_untested(framework: str) -> None:
    """Warn once per process if the installed version of a framework is outside the tested range."""
    if framework in _warned:
        return
    _warned.add(framework)
    if (said := untested(framework)) is not None:
        warnings.warn(said, RuntimeWarning, stacklevel=3)


def untested(framework: str) -> str | None:
    """Return a warning about the installed version of a framework; None if in the tested range."""
    text = getattr(sys.modules.get(framework), "__version__", None)
    if text is None:
        import importlib.metadata  # takes a tenth of NumPy's own import time

        text = importlib.metadata.version(framework)
    numbers = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    oldest, newest = TESTED[framework]
    if oldest <= numbers <= newest:
        return None
    return f"mempool was tested with {framework} {_dotted(oldest)} to {_dotted(newest)}, not with {text}"


def made_with(framework: str) -> str:
    """Return the framework and its version, as "torch 2.13.0"; empty if not imported."""
    version = getattr(sys.modules.get(framework), "__version__", None)
    return "" if version is None else f"{framework} {version}"


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))

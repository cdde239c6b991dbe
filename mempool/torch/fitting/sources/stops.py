"""What stops a program at its first backward, and goes on stopping one that catches all exceptions."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

_DISTRIBUTIONS = str(Path(torch.distributions.__file__).parent)
_HERE = str(Path(__file__).parent)
_OTHERS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), str(contextlib.__file__), "<")


class Trains(BaseException):
    """The program goes backward for the first time; no Exception, so that few programs catch it.

    Where one catches it all the same, and so lets go of it, the next line of the program raises another,
    which is outside of the `try` that caught this: a loop around a bare `except:` comes to its end.
    """

    def __init__(self, told: Callable[[], object]) -> None:
        super().__init__()
        self._told = told

    def __del__(self) -> None:
        """Does nothing once the program has ended, for then none of its frames is left."""
        if there := frames():
            self._told()
            stop_at_next_line(self._told, there)


def stop_at_next_line(told: Callable[[], object], there: list[FrameType] | None = None) -> None:
    """Raise `Trains` at the next line of the program. Sets the trace function of this thread."""

    def line(_frame: Any, event: str, _argument: Any) -> Any:
        if event == "line":
            raise Trains(told)  # Python forgets the trace function hereby
        return line

    for frame in frames() if there is None else there:
        frame.f_trace = line
    sys.settrace(lambda *_: None)


def frames() -> list[FrameType]:
    """Of the program that `load_script` or `load_module` runs, not PyTorch's nor ours; innermost first."""
    found: list[FrameType] = []
    for frame in _stack():
        name = frame.f_code.co_filename
        if name.startswith(_HERE) and frame.f_code.co_name in ("load_script", "load_module"):
            return found
        if not name.startswith(_OTHERS):
            found.append(frame)
    return []


def place() -> str:
    """File and line that this thread is at, not PyTorch's nor ours."""
    there = (frame for frame in _stack() if not frame.f_code.co_filename.startswith(_OTHERS))
    return next((f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in there), "")


def validates_distribution() -> bool:
    """Return whether a distribution of PyTorch validates its parameters, which are taken to be valid."""
    return any(frame.f_code.co_filename.startswith(_DISTRIBUTIONS) for frame in _stack())


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back

"""Abort of a program at the first backward, even if the program catches all exceptions."""

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
    """Signal of a program's first backward; not an Exception, so that few programs catch this signal.

    If the program catches and drops this one nevertheless, the next line of the program raises another,
    outside of the `try` that caught the first: a loop around a bare `except:` comes to an end.
    """

    def __init__(self, told: Callable[[], object]) -> None:
        super().__init__()
        self._told = told

    def __del__(self) -> None:
        """Raise again at the next line, unless the program has ended and no frame is left."""
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
    """Return the frames of the program run by `load_script` or `load_module`, innermost first.

    Frames of PyTorch and of this package are left out.
    """
    found: list[FrameType] = []
    for frame in _stack():
        name = frame.f_code.co_filename
        if name.startswith(_HERE) and frame.f_code.co_name in ("load_script", "load_module"):
            return found
        if not name.startswith(_OTHERS):
            found.append(frame)
    return []


def place() -> str:
    """Return file and line of this thread's innermost frame outside PyTorch and this package."""
    there = (frame for frame in _stack() if not frame.f_code.co_filename.startswith(_OTHERS))
    return next((f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in there), "")


def validates_distribution() -> bool:
    """Return whether a distribution of PyTorch is validating its parameters, which are assumed valid."""
    return any(frame.f_code.co_filename.startswith(_DISTRIBUTIONS) for frame in _stack())


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back

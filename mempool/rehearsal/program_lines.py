"""Lines of the rehearsed program, as opposed to those of libraries."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_LIBRARIES = (os.path.dirname(os.__file__), str(Path(__file__).parents[1]))  # noqa: PTH120


def own_line(frame: FrameType, number: int) -> str:
    """Return ``file:line`` of a line in a frame of the program itself, or "" for frames of libraries."""
    name = frame.f_code.co_filename
    if name.startswith(("<", *_LIBRARIES)) or "site-packages" in name or "/torchinductor_" in name:
        return ""
    return f"{os.path.relpath(name)}:{number}"


def is_run_by_program(frame: FrameType | None) -> bool:
    """Return true if the program runs a frame, itself or through a library, beyond an import of a module."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        if own_line(frame, 1):
            return True
        frame = frame.f_back
    return False


def program_line(frame: FrameType | None) -> str:
    """Return the innermost line of the program in a stack, or the innermost line of all."""
    innermost = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    while frame is not None:
        if line := own_line(frame, frame.f_lineno):
            return line
        frame = frame.f_back
    return innermost

"""NumPy's functions that make plain arrays of whatever they are given: what is watched escapes there."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.recorders.arrays import current
from traces.recorders.arrays.memory import root_of
from traces.recorders.arrays.operands import WATCHED, Operands

if TYPE_CHECKING:
    from collections.abc import Callable

#: No protocol of NumPy tells of these.
NAMES = ("array", "asarray", "ascontiguousarray", "asfortranarray", "asarray_chkfinite", "require")


class Conversions:
    """While it has begun, these functions tell the recorder of watched arrays; what they give is the same.

    What somebody imported by name before is not reached, nor is what C code does.
    """

    def __init__(self) -> None:
        self._before: dict[str, Callable[..., Any]] = {}

    def begin(self) -> None:
        """Take the place of NumPy's functions."""
        for name in NAMES:
            self._before[name] = getattr(np, name)
            setattr(np, name, _telling(self._before[name], name))

    def end(self) -> None:
        """Put them back, but for what somebody else has put there meanwhile."""
        for name, before in self._before.items():
            if getattr(getattr(np, name), "__wrapped__", None) is before:
                setattr(np, name, before)


def _telling(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(plain)
    def convert(*args: Any, **kwargs: Any) -> Any:
        recorder = current.recorder
        given = args[0] if args else next(iter(kwargs.values()), None)
        if recorder is None or not _holds_watched(given):
            return plain(*args, **kwargs)
        operands = Operands()
        args, kwargs = operands.plain(args), operands.plain(kwargs)
        result = plain(*args, **kwargs)
        original = operands.original(result)
        if original is not result and "subok" in kwargs:
            return original  # as `numpy.asanyarray`
        if any(root_of(result) is root_of(one) for one in operands.arrays):
            recorder.escape(result)
            return result
        recorder.note(name, operands.arrays, result)
        return recorder.watched(operands, result, [])

    return convert


def _holds_watched(value: Any) -> bool:
    if type(value) in WATCHED:
        return True
    return type(value) in (list, tuple) and any(map(_holds_watched, value))

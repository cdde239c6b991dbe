"""Patches of NumPy's functions that convert any input to a plain array: watched arrays escape there."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from mempool.recording.arrays import current
from mempool.recording.arrays.memory import root_of
from mempool.recording.arrays.operands import WATCHED, Operands

if TYPE_CHECKING:
    from collections.abc import Callable

#: Functions that none of NumPy's protocols intercepts.
NAMES = ("array", "asarray", "ascontiguousarray", "asfortranarray", "asarray_chkfinite", "require")


class Conversions:
    """Patches by which these functions report watched arrays to the recorder; results stay the same.

    Functions that a module imported by name earlier are not patched, nor are calls from C code.
    """

    def __init__(self) -> None:
        self._before: dict[str, Callable[..., Any]] = {}

    def begin(self) -> None:
        """Replace NumPy's functions by the reporting ones."""
        for name in NAMES:
            self._before[name] = getattr(np, name)
            setattr(np, name, _telling(self._before[name], name))

    def end(self) -> None:
        """Restore NumPy's functions, except those that other code has replaced in the meantime."""
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
            return original  # as `numpy.asanyarray` does
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

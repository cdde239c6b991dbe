"""Patches of functions of NumPy and CuPy that no protocol intercepts, by which they report watched arrays."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import numpy as np

from mempool.recording.arrays import active_recorder
from mempool.recording.arrays.operands import WATCHED, Operands, name_of
from mempool.recording.arrays.rows import root_of
from mempool.recording.arrays.rules import PLAIN, Rule, rule_of

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
        recorder = active_recorder.recorder
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


#: Classes whose instances have methods that make arrays.
_GENERATORS = ("Generator", "RandomState")


class Module:
    """A module whose functions are recorded; all other attributes are unchanged."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if isinstance(found, types.ModuleType):
            return Module(found)
        if isinstance(found, type) or not callable(found):
            return found
        return Function(found, name, rule_of(name))

    def __dir__(self) -> list[str]:
        return dir(self._module)

    def __repr__(self) -> str:
        return f"<{self._module!r}, recorded>"


class Function:
    """A recorded function, ufunc with methods, or kernel."""

    def __init__(
        self, function: Any, name: str = "", rule: Rule = PLAIN, also: frozenset[int] | None = frozenset()
    ) -> None:
        self._function, self._rule, self._also = function, rule, also
        self.__name__ = name or name_of(function)
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, with plain arrays in place of watched ones."""
        result = active_recorder.operate(self.__name__, self._function, args, kwargs, self._rule, self._also)
        return Random(result) if type(result).__name__ in _GENERATORS else result

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._function, name)
        return Function(found, f"{self.__name__}.{name}", rule_of(name)) if callable(found) else found

    def __repr__(self) -> str:
        return f"<{self._function!r}, recorded>"


class Random:
    """A generator of random numbers, whose arrays are watched."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._generator, name)
        return Function(found, name, rule_of(name)) if callable(found) else found

"""Conversion of watched arrays among the arguments of a call to plain arrays, and back in the result."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

#: The classes of watched arrays mapped to the library's own class; and the reverse.
WATCHED: dict[type, type] = {}
CLASSES: dict[type, type] = {}
#: The libraries' own classes, whose instances are arrays.
_arrays: tuple[type, ...] = (np.ndarray,)
_NUMBERS = (int, float, complex, str, bytes)  # a list of results with such a first element holds no arrays


def enlist(watched: type, plain: type) -> None:
    """Register a class of watched arrays for a library's own class."""
    global _arrays
    WATCHED[watched], CLASSES[plain] = plain, watched
    _arrays = tuple(CLASSES)


def is_array(thing: Any) -> bool:
    """Return true for an array of a recorded library."""
    return isinstance(thing, _arrays)


class Operands:
    """The arrays among the arguments of one call.

    Attributes:
        arrays: all arrays found, as plain arrays, in their order.
    """

    __slots__ = ("_originals", "arrays")

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self._originals: dict[int, Any] = {}

    def plain(self, value: Any) -> Any:
        """Return the value with plain arrays for watched ones, also inside lists, tuples and dicts.

        Containers are copied only if an element changes.
        """
        kind = type(value)
        library = WATCHED.get(kind)
        if library is not None:
            result = library.view(value, library)  # type: ignore[attr-defined]
            self._originals[id(result)] = value
            self.arrays.append(result)  # keeps the object alive, and so its id unique
            return result
        if kind is tuple or kind is list:
            given = [self.plain(one) for one in value]
            return value if all(map(operator.is_, given, value)) else kind(given)
        if kind is dict:
            named = {key: self.plain(one) for key, one in value.items()}
            return value if all(map(operator.is_, named.values(), value.values())) else named
        if isinstance(value, _arrays):
            self.arrays.append(value)
        return value

    def original(self, result: Any) -> Any:
        """Return the caller's array if the call returned that same object; in tuples too."""
        given = self._originals.get(id(result))
        if given is not None:
            return given
        if type(result) is tuple:
            return tuple(self.original(one) for one in result)
        return result


def arrays_in(value: Any) -> list[Any]:
    """Return the arrays of a result or of arguments: the value, or those in tuples, lists and dicts."""
    if is_array(value):
        return [value]
    if isinstance(value, tuple) or (isinstance(value, list) and value and not isinstance(value[0], _NUMBERS)):
        return [one for part in value for one in arrays_in(part)]
    if isinstance(value, dict):
        return [one for part in value.values() for one in arrays_in(part)]
    return []


def name_of(function: Any) -> str:
    """Return the name of a function, a ufunc or a kernel."""
    return str(getattr(function, "__name__", "") or getattr(function, "name", "") or type(function).__name__)

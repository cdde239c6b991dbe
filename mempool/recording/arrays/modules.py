"""Array modules whose functions are recorded, whatever their arguments are."""

from __future__ import annotations

import types
from typing import Any

from mempool.recording.arrays import current
from mempool.recording.arrays.operands import name_of
from mempool.recording.arrays.rules import PLAIN, Rule, rule_of

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
        result = current.operate(self.__name__, self._function, args, kwargs, self._rule, self._also)
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

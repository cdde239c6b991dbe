"""Conditions on NaN and infinity, which get the result of a sound run: all numbers are finite."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_ATTRIBUTE = "_mempool_true_if_finite"
_FALSE = frozenset(("isnan", "isinf", "isposinf", "isneginf"))
_KEPT = frozenset(("any", "all", "bool", "view", "reshape", "flatten", "detach", "cpu", "to"))
_NOT = frozenset(("logical_not", "bitwise_not", "__invert__"))
_OR = frozenset(("logical_or", "bitwise_or", "__or__", "__ror__"))
_AND = frozenset(("logical_and", "bitwise_and", "__and__", "__rand__"))


class FiniteNumbers(TorchFunctionMode):
    """Function mode that records the value of each condition if all numbers are finite."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        truth = _truth(getattr(func, "__name__", ""), args)
        if truth is not None and isinstance(result, torch.Tensor):
            setattr(result, _ATTRIBUTE, truth)
        return result


def true_if_finite(tensor: torch.Tensor) -> bool | None:
    """Return the value of a condition if all numbers are finite; None if unknown."""
    found: bool | None = getattr(tensor, _ATTRIBUTE, None)
    return found


def _truth(name: str, args: Any) -> bool | None:
    if name in _FALSE or name == "isfinite":
        return name == "isfinite"
    known = [true_if_finite(arg) for arg in args[:2] if isinstance(arg, torch.Tensor)]
    if not known or all(truth is None for truth in known):
        return None
    if name in _KEPT:
        return known[0]
    if name in _NOT:
        return not known[0]
    decides = name in _OR
    if len(known) == 2 and (decides or name in _AND):
        if decides in known:
            return decides
        return None if None in known else not decides
    return None

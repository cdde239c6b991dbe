"""Reads of values by a program whose tensors have none: the answers, and the lines that read."""

from __future__ import annotations

import ast
import linecache
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mempool.rehearsal.child import program_line
from mempool.torch.estimate.options import OPTIONS

if TYPE_CHECKING:
    from types import FrameType


_OTHERS = (str(Path(__file__).parents[3]), str(Path(torch.__file__).parent), "<")
_aten = torch.ops.aten
#: Random indices and orders, which hosts read.
_DRAWN = frozenset(
    (
        *(getattr(_aten.randint, name) for name in ("default", "low", "generator", "low_generator")),
        *(_aten.randperm.default, _aten.randperm.generator),
    )
)
_ATTRIBUTE = "_mempool_true_if_finite"
_FALSE = frozenset(("isnan", "isinf", "isposinf", "isneginf"))
_KEPT = frozenset(("any", "all", "bool", "view", "reshape", "flatten", "detach", "cpu", "to"))
_NOT = frozenset(("logical_not", "bitwise_not", "__invert__"))
_OR = frozenset(("logical_or", "bitwise_or", "__or__", "__ror__"))
_AND = frozenset(("logical_and", "bitwise_and", "__and__", "__rand__"))


class ValueReads(TorchDispatchMode):
    """Dispatch mode that answers a program's reads: zero for numbers, false for conditions.

    Conditions on NaN and infinity get the answer for finite numbers, and assertions hold. Lines that read
    other conditions are added to ``decisions``, and lines that read numbers to ``numbers``. Random indices
    and orders have values.
    """

    def __init__(self, decisions: list[str], numbers: list[str]) -> None:
        super().__init__()
        self._decisions, self._numbers = decisions, numbers
        self._asserted: dict[tuple[str, int], bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default and args[0].constant is None:
            if (truth := true_if_finite(args[0])) is not None:
                return truth
            return self._answer(args[0].dtype)
        result = func(*args, **(kwargs or {}))
        if func in _DRAWN and result.numel() <= OPTIONS.known_elements:
            with _disable_current_modes():
                result.constant = func(*args, **(kwargs or {}))
            result.fake_mode.fake_tensor_converter.add_constant_storage_mapping(result)
        return result

    def _answer(self, dtype: torch.dtype) -> bool | float:
        """Return the answer to a read, and note the line of the program that reads."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith(_OTHERS) and frame.f_back is not None:
            frame = frame.f_back
        condition = dtype is torch.bool
        if self._is_asserted(frame):
            return condition
        noted, line = self._decisions if condition else self._numbers, program_line(frame)
        if line not in noted:
            noted.append(line)
        return False if condition else 0.0 if dtype.is_floating_point or dtype.is_complex else 0

    def _is_asserted(self, frame: FrameType) -> bool:
        """Return whether a frame is executing an assertion."""
        file, line = frame.f_code.co_filename, frame.f_lineno
        if (file, line) not in self._asserted:
            try:
                nodes = ast.walk(ast.parse("".join(linecache.getlines(file, frame.f_globals))))
            except (SyntaxError, ValueError):
                nodes = iter(())
            self._asserted[file, line] = any(
                isinstance(node, ast.Assert) and node.lineno <= line <= (node.end_lineno or 0)
                for node in nodes
            )
        return self._asserted[file, line]


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

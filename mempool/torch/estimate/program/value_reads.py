"""Reads of values by a program whose tensors have none: the answers, and the lines that read."""

from __future__ import annotations

import ast
import contextlib
import linecache
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mempool.rehearsal.child import program_line
from mempool.torch.estimate.device.kernels import for_fake_tensors, override_kernels
from mempool.torch.estimate.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator
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
#: Tests of values, and their results for finite numbers; `finite_numbers` adds ``isfinite``.
_FINITE = {getattr(_aten, name).default: False for name in ("isnan", "isinf", "isposinf", "isneginf")}


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
            return self._answer(args[0].dtype)
        result = func(*args, **(kwargs or {}))
        if func in _DRAWN and result.numel() <= OPTIONS.known_elements:
            with _disable_current_modes():
                _know(result, func(*args, **(kwargs or {})))
        elif func in _FINITE:
            _know_all(result, truth=_FINITE[func])
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


@contextlib.contextmanager
def finite_numbers() -> Iterator[None]:
    """Let ``isfinite`` of fake tensors hold while the block runs; PyTorch composes it from comparisons."""

    def isfinite(tensor: torch.Tensor) -> torch.Tensor:
        result = (tensor == tensor).mul(tensor.abs() != float("inf"))
        _know_all(result, truth=True)
        return result

    with override_kernels("AutogradCPU", {"isfinite": for_fake_tensors("isfinite", isfinite)}):
        yield


def _know_all(result: Any, *, truth: bool) -> None:
    with _disable_current_modes():
        _know(result, torch.tensor(truth).expand(result.shape))


def _know(result: Any, values: torch.Tensor) -> None:
    """Let fake mode know a result's values, and those of numbers that are computed from them alone."""
    result.constant = values
    result.fake_mode.fake_tensor_converter.add_constant_storage_mapping(result)

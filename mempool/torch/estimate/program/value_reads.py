"""Reads of values by a program whose tensors have none: the answers, and the lines that read."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mempool.rehearsal.value_reads import note
from mempool.torch.estimate.device.kernels import for_fake_tensors, override_kernels
from mempool.torch.estimate.device.library_patches import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator

_aten = torch.ops.aten
#: Tests of values, and their results for finite numbers; `finite_numbers` adds ``isfinite``.
_FINITE = {getattr(_aten, name).default: False for name in ("isnan", "isinf", "isposinf", "isneginf")}


class ValueReads(TorchDispatchMode):
    """Dispatch mode that answers a program's reads: zero for numbers, false for conditions.

    Conditions on NaN and infinity get the answer for finite numbers. Reads of other conditions are counted by
    line in ``decisions``, and reads of numbers in ``numbers``.
    """

    def __init__(self, decisions: dict[str, int], numbers: dict[str, int]) -> None:
        super().__init__()
        self._decisions, self._numbers = decisions, numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _aten._local_scalar_dense.default and args[0].constant is None:
            note(self._decisions if args[0].dtype is torch.bool else self._numbers, sys._getframe(1))
            return _zeros(args[0])
        result = func(*args, **(kwargs or {}))
        if func in _FINITE:
            _know(result, truth=_FINITE[func])
        return result


@contextlib.contextmanager
def finite_numbers(numbers: dict[str, int]) -> Iterator[None]:
    """Let ``isfinite`` of fake tensors hold while the block runs; PyTorch composes it from comparisons.

    Also read whole lists at once: numbers that are known, or else zeros, counted in ``numbers``.
    """

    def isfinite(tensor: torch.Tensor) -> torch.Tensor:
        result = (tensor == tensor).mul(tensor.abs() != float("inf"))
        _know(result, truth=True)
        return result

    def tolist(tensor: Any) -> Any:
        if tensor.constant is None:
            note(numbers, sys._getframe(1))
            return _zeros(tensor)
        with _disable_current_modes():
            return tensor.constant.tolist()

    kernels = {"isfinite": for_fake_tensors("isfinite", isfinite)}
    with override_kernels("AutogradCPU", kernels), replaced(FakeTensor, "tolist", tolist):
        yield


def _zeros(tensor: torch.Tensor) -> Any:
    """Return the values of a tensor, taken to be zero, as Python's."""
    with _disable_current_modes():
        return torch.zeros(tensor.shape, dtype=tensor.dtype).tolist()


def _know(result: Any, *, truth: bool) -> None:
    """Let fake mode know a result's values, and those of numbers that are computed from them alone."""
    with _disable_current_modes():
        result.constant = torch.tensor(truth).expand(result.shape)
    result.fake_mode.fake_tensor_converter.add_constant_storage_mapping(result)

"""Answers to reads of tensors without values: zero for numbers, false for conditions."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mempool.rehearsal.value_reads import note

if TYPE_CHECKING:
    from collections.abc import Callable


class ValueReads:
    """Answers to a program's reads, counted by line.

    Attributes:
        decisions: number of reads of conditions, by source line.
        numbers: number of reads of numbers, by source line.
    """

    def __init__(self, decisions: dict[str, int], numbers: dict[str, int]) -> None:
        self.decisions, self.numbers = decisions, numbers

    def read(self, tensor: torch.Tensor) -> Any:
        """Return the values of a tensor; answers `ValuelessMode.on_read`."""
        note(self.decisions if tensor.dtype is torch.bool else self.numbers, sys._getframe(1))
        with _disable_current_modes():
            return torch.zeros(tensor.shape, dtype=tensor.dtype).tolist()

    def list_method(self) -> Callable[[Any], Any]:
        """Return a method ``tolist`` of fake tensors that makes no tensor per value."""

        def tolist(tensor: Any) -> Any:
            if tensor.constant is None:
                return self.read(tensor)
            with _disable_current_modes():
                return tensor.constant.tolist()

        return tolist

"""How a tensor lies in its memory, and memory in which another may lie so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Form:
    """Of a tensor that has left: what it must be when it is back.

    Attributes:
        size: of each dimension.
        stride: of each dimension, elements.
        dtype: of its elements.
    """

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """That of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether each byte has the same place in both; strides of one element say nothing."""
        if (tensor.shape, tensor.dtype) != (self.size, self.dtype):
            return False
        return self.stride == tensor.stride() or all(
            n == 1 or a == b for n, a, b in zip(self.size, self.stride, tensor.stride(), strict=True)
        )

    def typed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or one of its size and strides for elements of the right type."""
        if tensor.dtype == self.dtype:
            return tensor
        return room(tensor.shape, tensor.stride(), self.dtype, tensor.device)

    def room(self, device: torch.device) -> torch.Tensor:
        """A tensor that is about to be filled."""
        return room(self.size, self.stride, self.dtype, device)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes from a tensor's first to its last element, as they lie in its memory: uint8[n]."""
    start = tensor.storage_offset() * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(), start, (extent(tensor),), (1,)
    )


def room(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor that is about to be filled, as PyTorch would before, where it is to be deterministic."""
    if not torch.are_deterministic_algorithms_enabled():
        return torch.empty_strided(size, stride, dtype=dtype, device=device)
    tensor = torch.empty(0, dtype=dtype, device=device)
    storage = tensor.untyped_storage()  # a new one on the CPU would not be the allocator's that is set
    storage.resize_(dtype.itemsize * _elements(size, stride))
    return tensor.set_(storage, 0, size, stride)


def extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first to its last element."""
    if tensor.is_contiguous():
        return int(tensor.nbytes)
    return int(_elements(tensor.shape, tensor.stride()) * tensor.element_size())


def _elements(size: Sequence[int], stride: Sequence[int]) -> int:
    """Places from the first to the last of a tensor's elements."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))

"""The layout of a tensor in memory, and the allocation of tensors with a given layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Form:
    """The form that an offloaded tensor must have after the reload.

    Attributes:
        size: the size of each dimension.
        stride: the stride of each dimension, in elements.
        dtype: the type of the elements.
    """

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """Return the form of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return true if each byte has the same place in both; strides of size-1 dimensions do not matter."""
        if (tensor.shape, tensor.dtype) != (self.size, self.dtype):
            return False
        return self.stride == tensor.stride() or all(
            n == 1 or a == b for n, a, b in zip(self.size, self.stride, tensor.stride(), strict=True)
        )

    def typed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a new one of the same size and strides with the right element type."""
        if tensor.dtype == self.dtype:
            return tensor
        return room(tensor.shape, tensor.stride(), self.dtype, tensor.device)

    def room(self, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor of this form."""
        return room(self.size, self.stride, self.dtype, device)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes from a tensor's first to last element, in memory order: uint8[n]."""
    start = tensor.storage_offset() * tensor.element_size()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(), start, (extent(tensor),), (1,)
    )


def room(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return an uninitialized tensor; in deterministic mode without PyTorch's initial fill."""
    if not torch.are_deterministic_algorithms_enabled():
        return torch.empty_strided(size, stride, dtype=dtype, device=device)
    tensor = torch.empty(0, dtype=dtype, device=device)
    storage = tensor.untyped_storage()  # a new CPU storage would bypass the allocator that is set
    storage.resize_(dtype.itemsize * _elements(size, stride))
    return tensor.set_(storage, 0, size, stride)


def extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first to last element."""
    if tensor.is_contiguous():
        return int(tensor.nbytes)
    return int(_elements(tensor.shape, tensor.stride()) * tensor.element_size())


def _elements(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of element places from a tensor's first to last element."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))

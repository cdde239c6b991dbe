"""The storages behind a tensor, for any type of tensor."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def is_wrapper(kind: Any) -> bool:
    """Return true if tensors of this class keep their memory in other tensors, as DTensor does."""
    return (
        issubclass(kind, torch.Tensor)
        and not issubclass(kind, FakeTensor)
        and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold the memory of a tensor: itself, its parts, or none if unknown."""
    if hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, FakeTensor):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, name), torch.Tensor):
                yield from plain_tensors(part)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in _COMPRESSED:
        yield from (getattr(tensor, part)() for part in _COMPRESSED[tensor.layout])
    elif tensor.layout is torch.strided:
        yield tensor


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_in(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from tensors_in(entry)


def storages_in(value: Any) -> Sequence[tuple[torch.Tensor, Any]]:
    """Return the storages of an argument or result of an operation, each with a tensor inside."""
    kind = type(value)
    if kind in _PLAIN:
        try:
            return ((value, value.untyped_storage()),)
        except (NotImplementedError, RuntimeError):  # a sparse tensor, or an opaque one
            return [(plain, plain.untyped_storage()) for plain in plain_tensors(value)]
    if kind is list or kind is tuple:
        if _PLAIN.issuperset(map(type, value)):  # the long lists of foreach operations
            with contextlib.suppress(NotImplementedError, RuntimeError):
                return [(entry, entry.untyped_storage()) for entry in value]
        return [pair for entry in value if entry is not None for pair in storages_in(entry)]
    return [
        (plain, plain.untyped_storage()) for tensor in tensors_in(value) for plain in plain_tensors(tensor)
    ]


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, FakeTensor))

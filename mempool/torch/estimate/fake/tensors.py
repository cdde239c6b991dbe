"""Fake tensors in place of real ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from mempool.errors import UsageError
from mempool.torch.estimate.fake.ones import mark, real_ones


def to_fake(given: Any) -> Any:
    """Replace real tensors in a structure by fake ones of the same sizes, strides and sharing."""
    bases: dict[int, torch.Tensor] = {}
    return pytree.tree_map_only(torch.Tensor, lambda t: fake_of(t, bases), given)


def fake_of(tensor: torch.Tensor, bases: dict[int, torch.Tensor], *, again: bool = False) -> torch.Tensor:
    """Return a fake tensor of the same kind, on the CPU.

    Args:
        tensor: a real tensor, or one on the meta device.
        bases: fake storages by the address of known real storages; views share a storage.
        again: whether to copy a tensor that is fake already.
    """
    if not again and isinstance(tensor, FakeTensor) and tensor.device.type == "cpu":
        return tensor
    if tensor.layout is not torch.strided:
        raise UsageError(f"a tensor with layout {tensor.layout}: only strided ones have a known size")
    storage = tensor.untyped_storage()
    base = bases.get(storage._cdata)
    if base is None:
        base = bases[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
    whole = base[: storage.nbytes() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
    made = whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    if real_ones(tensor):
        mark(made)
    return made.requires_grad_(tensor.requires_grad)

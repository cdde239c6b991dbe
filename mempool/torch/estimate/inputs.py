"""Inputs of a model in the forms that users give, for a batch of any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mempool.errors import UsageError

#: Positional and named arguments.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments(given: Any) -> Arguments:
    """Return a call's arguments: a mapping by name, a tuple or list by position, else one value."""
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given), {}) if isinstance(given, (tuple, list)) else ((given,), {})


def batch_of(*given: Any, dim: int = 0) -> int | None:
    """Return the size of a dimension of the first tensor of sufficient rank; None without such a tensor."""
    for leaf in pytree.tree_leaves(given):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > dim:
            return int(leaf.size(dim))
    return None


def resizable(given: Any, batch: int | None, batch_dim: int = 0) -> Callable[[int], Any]:
    """Return a function that makes inputs for a batch, from a user's inputs.

    Args:
        given: a function of a batch's size, which is returned; else example inputs, whose tensors are made
            again with another size of the batch dimension if the present size is ``batch``.
        batch: size of the batch dimension of the examples.
        batch_dim: index of the batch dimension; for tensors with fewer dimensions the first one.
    """
    if callable(given) and not isinstance(given, torch.Tensor):
        made: Callable[[int], Any] = given
        return made

    def of(size: int) -> Any:
        if size == batch:
            return given
        if batch is None:
            raise UsageError("no input tensor has a batch dimension: give a function of the batch's size")
        return pytree.tree_map_only(torch.Tensor, lambda t: _resized(t, batch, size, batch_dim), given)

    return of


def _resized(tensor: torch.Tensor, batch: int, size: int, batch_dim: int) -> torch.Tensor:
    """Return a tensor of the new size without values, with the same order of dimensions in memory."""
    dim = batch_dim if tensor.dim() > batch_dim else 0
    if tensor.dim() == 0 or tensor.size(dim) != batch:
        return tensor
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d))
    made = torch.empty_permuted(shape, order, dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)

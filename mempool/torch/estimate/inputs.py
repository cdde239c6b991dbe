"""Inputs of a model: the forms that users give, the batch dimension, and the number of positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mempool.errors import UsageError

#: Positional and named arguments.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def call_arguments(given: Any) -> Arguments:
    """Return (positional, named) arguments from a mapping, a tuple or list, or a single value."""
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given), {}) if isinstance(given, (tuple, list)) else ((given,), {})


def is_function(given: Any) -> bool:
    """Return whether inputs are a function of the batch size, unlike a tensor or a mapping."""
    return callable(given) and not isinstance(given, (torch.Tensor, Mapping))


def batch_of(*given: Any, dim: int = 0) -> int | None:
    """Return the size of a dimension of the first tensor of sufficient rank; None without such a tensor."""
    for leaf in pytree.tree_leaves(given):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > dim:
            return int(leaf.size(dim))
    return None


def resizable(given: Any, batch: int | None, batch_dim: int = 0) -> Callable[[int], Any]:
    """Return a function that makes inputs for a batch size from a user's inputs.

    Args:
        given: a function of the batch size, which is returned, or example inputs, whose tensors are resized
            in the batch dimension if their size there is ``batch``.
        batch: size of the batch dimension of the examples.
        batch_dim: index of the batch dimension; the first dimension for tensors with fewer dimensions.
    """
    if is_function(given):
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
    """Return a tensor of another batch size without values, with the same memory order of dimensions."""
    dim = batch_dim if tensor.dim() > batch_dim else 0
    if tensor.dim() == 0 or tensor.size(dim) != batch:
        return tensor
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d))
    made = torch.empty_permuted(shape, order, dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


def sequence_first(model: nn.Module) -> list[str]:
    """Return the types of the model's modules whose inputs have the length before the batch."""
    found = [
        type(module).__name__ for module in model.modules() if getattr(module, "batch_first", True) is False
    ]
    return list(dict.fromkeys(found))


def batch_doubt(modules: list[str], inputs: Any, batch: int) -> str | None:
    """Return the reason why example inputs cannot be resized along their first dimension, or None.

    Args:
        modules: types of the model's modules that take the length first, from `sequence_first`.
        inputs: the examples.
        batch: size of the first dimension of the first tensor.
    """
    leaves = pytree.tree_leaves(inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    if modules and any(tensor.dim() == 3 for tensor in tensors):
        return f"{modules[0]} takes the length first"
    odd = next((tuple(tensor.shape) for tensor in tensors if tensor.size(0) != batch), None)
    return None if odd is None else f"an input of {odd} does not begin with the batch of {batch:,}"

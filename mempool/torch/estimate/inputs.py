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
    """Return a call's arguments: a mapping by name, a tuple or list by position, else one value."""
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given), {}) if isinstance(given, (tuple, list)) else ((given,), {})


def is_function(given: Any) -> bool:
    """Return whether inputs are a function of the batch's size; a tensor is none, nor a mapping."""
    return callable(given) and not isinstance(given, (torch.Tensor, Mapping))


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
    """Return a tensor of the new size without values, with the same order of dimensions in memory."""
    dim = batch_dim if tensor.dim() > batch_dim else 0
    if tensor.dim() == 0 or tensor.size(dim) != batch:
        return tensor
    shape = (*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    order = sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), d))
    made = torch.empty_permuted(shape, order, dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


#: Modules that by default take the length first and the batch second.
_SEQUENCES = (
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
ADVICE = "say batch_dim=, or give a function of the batch's size as inputs"


def sequence_first(model: nn.Module) -> list[str]:
    """Return the types of the model's modules that take the length before the batch."""
    found = [
        type(module).__name__
        for module in model.modules()
        if isinstance(module, _SEQUENCES) and not _batch_first(module)
    ]
    return list(dict.fromkeys(found))


def _batch_first(module: nn.Module) -> bool:
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        module = module.self_attn
    return bool(getattr(module, "batch_first", False))


def batch_dimension(model: Any, inputs: Any) -> int:
    """Return the batch dimension: 1 for 3-d inputs of a leading recurrent module or transformer, else 0."""
    while isinstance(model, nn.Sequential) and len(model):
        model = model[0]
    if isinstance(model, (nn.TransformerEncoder, nn.TransformerDecoder)):
        model = model.layers[0]
    direct = isinstance(model, _SEQUENCES) and not _batch_first(model)
    return int(direct and next((t.dim() == 3 for t in _tensors(inputs)), False))


def batch_dimension_note(
    modules: list[str], inputs: Any, batch: int, dim: int, hint: str = ADVICE
) -> str | None:
    """Return a note on the assumed batch dimension if doubtful, else None.

    ``modules`` are the types returned by `sequence_first`; ``say`` is advice to the user.
    """
    tensors = _tensors(inputs)
    if dim or not (modules or any(t.size(0) != batch for t in tensors)):
        return None
    taken = [str(tuple(t.shape)) for t in tensors if t.dim() > dim and t.size(dim) == batch]
    why = f"{modules[0]} takes the length first" if modules else "inputs differ in it"
    return f"batch: dimension {dim} of {', '.join(taken[:3])}, though {why}; {hint}"


def fixed_size_note(inputs: Any, batch: int, dim: int) -> str | None:
    """Return a note on inputs without a batch to search for, such as the edges of a graph, else None."""
    for tensor in _tensors(inputs):
        edges = tensor.dim() == 2 and tensor.size(0) == 2 and tensor.dtype in (torch.int64, torch.int32)
        if dim == 0 and (edges or tensor.dim() == 1) and tensor.size(0) != batch:
            shape = tuple(tensor.shape)
            return f"no largest batch: an input of {shape} does not grow with the batch of {batch:,}"
    return None


def _tensors(inputs: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(inputs)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]


_FIELDS = ("max_position_embeddings", "max_target_positions", "n_positions", "max_seq_len")
#: Types of rotary positions that a factor stretches, without a count of the original positions.
_STRETCHED = ("linear", "dynamic")


def most_positions(config: Any) -> int | None:
    """Return the largest number of tokens that a configuration has positions for; None: not known."""
    text = config.get_text_config()
    found = next((n for name in _FIELDS if isinstance(n := getattr(text, name, None), int) and n > 0), None)
    if found is not None and getattr(text, "pad_token_id", None) == 1 and "oberta" in type(text).__name__:
        return found - 2  # positions begin after the padding's
    return None if found is None else int(found * _stretch(text))


def _stretch(text: Any) -> float:
    """Return the factor by which rotary positions extend the configuration's count."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) not in _STRETCHED:
        return 1
    factor = rope.get("factor")
    return factor if isinstance(factor, (int, float)) and factor > 1 else 1


def positions_warning(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return a warning if the model gets more tokens than positions, else None."""
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or (most := most_positions(config)) is None:
        return None
    tokens = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(tokens, torch.Tensor) or tokens.is_floating_point() or tokens.dim() != 2:
        return None
    if (length := tokens.size(1)) <= most:
        return None
    return (
        f"sequences of {length:,} tokens are longer than the {most:,} positions that the "
        f"{type(model).__name__} was made for: the memory is counted, what it would answer is another matter"
    )

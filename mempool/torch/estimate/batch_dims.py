"""Detection of the batch dimension of inputs, and warnings about doubtful cases."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

#: Modules that by default take the length first and the batch second.
_SEQUENCES = (
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
SAY = "say batch_dim=, or give a function of the batch's size as inputs"


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


def dim_of(model: Any, inputs: Any) -> int:
    """Return the batch dimension: 1 for 3-d inputs of a leading recurrent module or transformer, else 0."""
    while isinstance(model, nn.Sequential) and len(model):
        model = model[0]
    if isinstance(model, (nn.TransformerEncoder, nn.TransformerDecoder)):
        model = model.layers[0]
    direct = isinstance(model, _SEQUENCES) and not _batch_first(model)
    return int(direct and next((t.dim() == 3 for t in _tensors(inputs)), False))


def doubt(modules: list[str], inputs: Any, batch: int, dim: int, say: str = SAY) -> str | None:
    """Return a note on the assumed batch dimension if doubtful, else None.

    ``modules`` are the types returned by `sequence_first`; ``say`` is advice to the user.
    """
    tensors = _tensors(inputs)
    if dim or not (modules or any(t.size(0) != batch for t in tensors)):
        return None
    taken = [str(tuple(t.shape)) for t in tensors if t.dim() > dim and t.size(dim) == batch]
    why = f"{modules[0]} takes the length first" if modules else "inputs differ in it"
    return f"batch: dimension {dim} of {', '.join(taken[:3])}, though {why}; {say}"


def unscalable(inputs: Any, batch: int, dim: int) -> str | None:
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

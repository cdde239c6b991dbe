"""Outputs of a model: loss, and tensors of a key-value cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mempool.errors import UsageError
from mempool.torch.estimate.fake.copies import tensors_in

SUMMED = (
    "no loss was given and the model returns none: the sum of its floating outputs stands for it; "
    "a real loss, such as cross entropy, may need more memory"
)


def own_loss(output: Any) -> torch.Tensor | None:
    """Return an output's own loss: its ``loss``, as in transformers, or the output itself."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if found is None and isinstance(output, torch.Tensor) and output.dim() == 0:
        found = output
    return found if isinstance(found, torch.Tensor) else None


def summed(output: Any) -> torch.Tensor:
    """Return the sum of an output's tensors with a gradient, as a substitute for a loss.

    Raises:
        UsageError: the output has no such tensor.
    """
    parts = [
        (torch.view_as_real(leaf) if leaf.is_complex() else leaf).sum()
        for leaf in pytree.tree_leaves(_plain(output))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if not parts:
        raise UsageError("the model's output has no tensor with a gradient: give loss=")
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _plain(output: Any) -> Any:
    """Convert an output to plain containers: the items of an iterator, the attributes of an object."""
    if isinstance(output, (torch.Tensor, dict, list, tuple)):
        return output
    if hasattr(output, "__next__"):
        return list(output)
    return dict(vars(output)) if hasattr(output, "__dict__") else output


#: Fields of transformers outputs with keys and values, or the state, of the tokens so far.
_CACHES = ("cache", "past_key_values", "past_key_value", "cache_params", "past_buckets_states", "mems")


def cache_tensors(output: Any) -> list[torch.Tensor]:
    """Return the tensors of the key-value cache in an output of transformers, by name or in a tuple."""
    if isinstance(output, (tuple, list)):
        found = [part for part in output if type(part).__name__.endswith("Cache")]
    else:
        fields = output if isinstance(output, dict) else getattr(output, "__dict__", {})
        found = [fields[name] for name in list(fields) if name in _CACHES]
    return tensors_in(*found, outside=(nn.Module,))

"""The loss of a language model, without the logits of all its tokens at once."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from torch import nn

#: Pieces in which the tokens are gone through.
CHUNKS = 8
#: Settings of transformers by which logits are not the plain product with the head.
_SCALED = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunks: int = CHUNKS,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Mean cross entropy of ``hidden @ weight.T + bias``, a piece of the tokens at a time.

    The logits of a piece are let go after it, and computed again in the backward.

    Args:
        hidden: float[..., width], what goes into the head.
        weight: float[words, width], the head's.
        labels: int64[...], the right word for each; already shifted, for a model of the next word.
        bias: float[words].
        chunks: pieces at most.
        ignore_index: label of what does not count.
    """
    hidden, labels = hidden.flatten(0, -2), labels.flatten()
    total = hidden.new_zeros((), dtype=torch.float32)
    for some, own in zip(hidden.chunk(chunks), labels.chunk(chunks), strict=True):
        total = total + checkpoint(
            _summed, some, weight, bias, own, ignore_index, use_reentrant=False, preserve_rng_state=False
        )
    return total / (labels != ignore_index).sum()


def _summed(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    ignore_index: int,
) -> torch.Tensor:
    logits = functional.linear(hidden, weight, bias).float()
    return functional.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")


def can_chunk(model: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether a model is one of transformers that computes the loss of the next word, by a plain head."""
    loss = getattr(model, "loss_function", None)
    if getattr(loss, "__name__", "") != "ForCausalLMLoss" or kwargs.get("labels") is None:
        return False
    config = model.config
    scaled = any(getattr(config, name, None) not in (None, 1, 1.0) for name in _SCALED)
    return not scaled and type(model.get_output_embeddings()) is torch.nn.Linear


def chunk_loss(model: nn.Module, chunks: int = CHUNKS) -> nn.Module:
    """Make such a model return its loss alone, computed in pieces.

    Args:
        model: one that `can_chunk`; changed in place, and returned.
        chunks: pieces.
    """
    model.forward = functools.partial(_forward, model, chunks)
    return model


def _forward(
    model: nn.Module, chunks: int, *args: Any, labels: torch.Tensor, **kwargs: Any
) -> dict[str, torch.Tensor]:
    head = model.get_output_embeddings()
    hidden = model.base_model(*args, **kwargs)[0]
    shifted = functional.pad(labels, (0, 1), value=-100)[..., 1:]
    loss = chunked_cross_entropy(hidden, head.weight, shifted, bias=head.bias, chunks=chunks)
    return {"loss": loss}

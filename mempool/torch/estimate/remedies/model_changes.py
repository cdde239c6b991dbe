"""Changes of a model that save memory: a loss in pieces, saved tensors on the host, lower precision."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from mempool.torch.estimate.fake.copies import to_fake
from mempool.torch.estimate.options import OPTIONS

if TYPE_CHECKING:
    from torch import nn

    from mempool.torch.estimate.job import Job


#: Settings of transformers that make logits differ from the plain product with the head.
_SCALED = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


def chunked_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunks: int = OPTIONS.loss_chunks,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Return the mean cross entropy of ``hidden @ weight.T + bias``, one piece of the tokens at a time.

    The logits of a piece are freed after use, and recomputed in the backward.

    Args:
        hidden: float[..., width], input of the head.
        weight: float[words, width], the head's.
        labels: int64[...], the right word for each position; already shifted, for next-word models.
        bias: float[words].
        chunks: largest number of pieces.
        ignore_index: label of positions that are ignored.
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
    """Return whether a model of transformers computes the next-word loss with a plain head."""
    loss = getattr(model, "loss_function", None)
    if getattr(loss, "__name__", "") != "ForCausalLMLoss" or kwargs.get("labels") is None:
        return False
    config = model.config
    scaled = any(getattr(config, name, None) not in (None, 1, 1.0) for name in _SCALED)
    return not scaled and type(model.get_output_embeddings()) is torch.nn.Linear


def chunk_loss(model: nn.Module, chunks: int = OPTIONS.loss_chunks) -> nn.Module:
    """Make a model return only the loss, computed in pieces.

    Args:
        model: one that `can_chunk` accepts; changed in place, and returned.
        chunks: number of pieces.
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


def save_on_host(model: nn.Module) -> nn.Module:
    """Make the forward keep no saved tensors on the device, as ``save_on_cpu`` does.

    For fake tensors: a packed tensor holds no memory, and unpacking makes a new tensor, as with
    ``save_on_cpu``.

    Args:
        model: changed in place, and returned.
    """
    model.forward = functools.partial(_hooked, model.forward)
    return model


def _hooked(forward: Any, *args: Any, **kwargs: Any) -> Any:
    with saved_tensors_hooks(lambda t: (t.size(), t.dtype), lambda kept: torch.empty(kept[0], dtype=kept[1])):
        return forward(*args, **kwargs)


def in_low_precision(job: Job, dtype: torch.dtype = torch.bfloat16) -> Job:
    """Return the job with floating-point parameters, inputs, gradients and optimizer state of a type."""

    def inputs(batch: int) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda t: _cast(t, dtype), to_fake(job.inputs(batch)))

    return job.replace(dtype=dtype, inputs=inputs)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor

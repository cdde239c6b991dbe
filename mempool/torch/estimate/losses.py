"""Loss of a model's output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from mempool.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.torch.estimate.training_step import Job

SUMMED = (
    "no loss was given and the model returns none: the sum of its floating outputs stands for it; "
    "a real loss, such as cross entropy, may need more memory"
)


def loss_of(job: Job, output: Any, labels: Any, warn: Callable[[str], object]) -> torch.Tensor:
    """Return a scalar loss with a gradient.

    Raises:
        UsageError: the output and the job give no such loss.
    """
    if job.loss is not None:
        loss = job.loss(output) if job.labels is None else job.loss(output, labels)
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"the loss is a {type(loss).__name__}, not a tensor")
    else:
        loss = own_loss(output)
        if loss is None:
            loss = _summed(output)
            warn(SUMMED)
    if not loss.requires_grad:
        raise UsageError("the loss depends on no parameter that is trained: nothing to go backward through")
    return loss if loss.dim() == 0 else loss.sum()


def own_loss(output: Any) -> torch.Tensor | None:
    """Return the loss that an output holds, as outputs of transformers do, or that the output is."""
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if found is None and isinstance(output, torch.Tensor) and output.dim() == 0:
        found = output
    return found if isinstance(found, torch.Tensor) else None


def _summed(output: Any) -> torch.Tensor:
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
    """Convert an output to a structure with leaves: an iterator's items, an object's attributes."""
    if isinstance(output, (torch.Tensor, dict, list, tuple)):
        return output
    if hasattr(output, "__next__"):
        return list(output)
    return dict(vars(output)) if hasattr(output, "__dict__") else output

"""Targets: models to try with inputs, and requested sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.torch.estimate.inputs import Arguments
    from mempool.torch.model_spec import InputSpec


@dataclass(frozen=True)
class Sizes:
    """Requested properties of inputs.

    Attributes:
        seq: length of sequences, or None for the model's own.
        task: task of a model of transformers, or None.
        inputs: tensors that the model gets, or None for the model's own.
        labels: whether the inputs include labels for training.
    """

    seq: int | None = None
    task: str | None = None
    inputs: tuple[InputSpec, ...] | None = None
    labels: bool = True


@dataclass(frozen=True)
class Target:
    """A model to try with inputs.

    Attributes:
        title: description of the model.
        model: makes the model; called inside a fake mode.
        inputs: makes the inputs for a batch size; None if unknown.
        batch: samples in the model's own inputs; None if these have no batch size.
        seq: length of the model's sequences, if known.
        takes_seq: whether the inputs depend on the length of the sequences.
        attributes: of a `Job`, as the target itself decides: optimizer, loss, labels, autocast, ...
        notes: assumptions.
        doubt: why inputs for other batches may be wrong; None if they are right.
    """

    title: str
    model: Callable[[], nn.Module]
    inputs: Callable[[int], Arguments] | None = None
    batch: int | None = None
    seq: int | None = None
    takes_seq: bool = False
    attributes: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    doubt: str | None = None


def fresh_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same form without a recorded operation that reads the original."""
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)

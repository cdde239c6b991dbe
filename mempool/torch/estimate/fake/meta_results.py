"""Meta results of operations: new tensors, views of arguments, or the arguments themselves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class Made(NamedTuple):
    """A new tensor, or, if ``of`` is not negative, a view of the argument at that position."""

    of: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0


class Given(NamedTuple):
    """The argument at a position, itself."""

    position: int


class Answer(NamedTuple):
    """Parts of a result, in a list or tuple (``kind``); a single part if ``kind`` is None."""

    kind: type | None
    parts: tuple[Made | Given | None, ...]


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor; a dimension of size zero counts as one."""
    return tuple(math.prod(max(1, size) for size in shape[at + 1 :]) for at in range(len(shape)))


def new(shape: Sequence[int], dtype: torch.dtype) -> Made:
    """Describe a new contiguous tensor."""
    return Made(-1, tuple(shape), dense(shape), dtype)


def like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Made:
    """Describe a new tensor of the same sizes and strides."""
    return Made(-1, tuple(tensor.shape), tensor.stride(), dtype or tensor.dtype)


def alone(part: Made | Given) -> Answer:
    """Return a result of one part."""
    return Answer(None, (part,))

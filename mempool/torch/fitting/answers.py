"""What an operation answers, as far as memory goes: new tensors, views of what was given, or that itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class Made(NamedTuple):
    """A tensor: a new one, or where ``of`` is not negative a view of the argument at that position."""

    of: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0


class Given(NamedTuple):
    """The argument at a position, itself."""

    position: int


class Answer(NamedTuple):
    """Parts, in a list or tuple of that type; alone where it is None."""

    kind: type | None
    parts: tuple[Made | Given | None, ...]


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor that lies row by row; a dimension of none counts as one."""
    return tuple(math.prod(max(1, size) for size in shape[at + 1 :]) for at in range(len(shape)))


def new(shape: Sequence[int], dtype: torch.dtype) -> Made:
    """A new tensor that lies row by row."""
    return Made(-1, tuple(shape), dense(shape), dtype)


def like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Made:
    """A new tensor of the same sizes and strides."""
    return Made(-1, tuple(tensor.shape), tensor.stride(), dtype or tensor.dtype)


def alone(part: Made | Given) -> Answer:
    """An answer of one part."""
    return Answer(None, (part,))

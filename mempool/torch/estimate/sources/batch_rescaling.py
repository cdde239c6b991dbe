"""Rescaling of sizes in a program's calls to another batch than the program's own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from mempool.torch.estimate.largest_batch import NoLargestBatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.torch.estimate.sources.loss_replay import TapeEntry

_VIEWS = frozenset(("view", "reshape"))
#: Functions whose whole-number arguments are sizes.
_SIZED = frozenset(
    (
        "expand", "repeat", "tile", "unflatten", "narrow", "split", "broadcast_to", "as_strided",
        "new_zeros", "new_ones", "new_empty", "new_full", "zeros", "ones", "empty", "full", "rand", "randn",
        "randint", "arange", "eye", "linspace", "randperm", "tril_indices", "triu_indices",
    )
)  # fmt: skip
_INDEXED = frozenset(("__getitem__", "__setitem__"))


class UnknownSizeError(NoLargestBatchError):
    """Error for a number in a program's loss that is unknown for another batch."""

    def __init__(self, entry: TapeEntry, why: str) -> None:
        reason = " ".join(why.split())[:160]
        super().__init__(
            f"the loss is known for the program's own batch only: {entry.name} at {entry.line} ({reason}); "
            "name a function that takes batch"
        )


class Rescaling:
    """Map from the program's sizes to current sizes, learned from tensors.

    Attributes:
        differ: whether any size differs.
    """

    def __init__(self) -> None:
        self._new: dict[int, int] = {}
        self._same = {-1, 0, 1}  # numbers that mean more than a size
        self.differ = False

    def learn(self, before: Sequence[int], now: Sequence[int]) -> None:
        """Record the dimensions of a tensor, in the program and now."""
        for old, new in zip(before, now, strict=False):
            if old == new or self._new.setdefault(old, new) != new:
                self._same.add(old)
            self.differ = self.differ or old != new

    def arguments(self, entry: TapeEntry, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of a call with the current sizes.

        Raises:
            UnknownSizeError: a number may or may not be one of the sizes that differ.
        """
        if entry.name in _INDEXED:
            return (args[0], self._index(entry, args[0], args[1]), *args[2:]), kwargs
        if entry.name in _VIEWS and isinstance(args[0], torch.Tensor):
            return self._view(entry, args, kwargs)
        if entry.name not in _SIZED:
            return args, kwargs
        made: tuple[Any, dict[str, Any]] = pytree.tree_map_only(
            int, lambda number: self._number(entry, number), (args, kwargs)
        )
        return made

    def _number(self, entry: TapeEntry, number: int) -> int:
        if isinstance(number, bool) or number not in self._new:
            return number
        if number in self._same:
            raise UnknownSizeError(entry, f"{number} is the size of more than one dimension")
        return self._new[number]

    def _view(self, entry: TapeEntry, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of a view, with a shape of the current number of elements."""
        tensor, requested = args[0], kwargs.get("shape", args[1:])
        shape = list(requested[0] if len(requested) == 1 and not isinstance(requested[0], int) else requested)
        if not all(isinstance(size, int) for size in shape):
            return args, kwargs  # a type
        for candidate in self._shapes(entry, shape, math.prod(entry.shapes[0]), tensor.numel()):
            known = math.prod(size for size in candidate if size != -1)
            if tensor.numel() == known or (-1 in candidate and known and tensor.numel() % known == 0):
                return (tensor, tuple(candidate)), {}
        raise UnknownSizeError(entry, f"{tuple(shape)} of {tuple(tensor.shape)}")

    def _shapes(self, entry: TapeEntry, shape: list[int], before: int, now: int) -> list[list[int]]:
        """Return candidate shapes: with known new sizes, or one dimension grown like the tensor."""
        if -1 in shape:
            return [[self._number(entry, size) for size in shape]]
        grown = []
        for at, size in enumerate(shape):
            if before and size * now % before == 0:
                grown.append([*shape[:at], size * now // before, *shape[at + 1 :]])
        return [[self._new.get(size, size) for size in shape], *grown]

    def _index(self, entry: TapeEntry, tensor: torch.Tensor, index: Any) -> Any:
        """Return an index with rescaled slices; refuse an index that selects single samples."""
        before = entry.shapes[0]
        parts = index if isinstance(index, tuple) else (index,)
        made = []
        for at, part in enumerate(parts):
            differs = at < len(before) and before[at] != tensor.size(at)
            made.append(self._part(entry, part, differs=differs))
        return tuple(made) if isinstance(index, tuple) else made[0]

    def _part(self, entry: TapeEntry, part: Any, *, differs: bool) -> Any:
        if isinstance(part, range):
            return range(*(self._number(entry, end) for end in (part.start, part.stop, part.step)))
        if type(part) is int and differs and part not in (0, -1):
            raise UnknownSizeError(entry, f"sample {part} alone")
        if not isinstance(part, slice):
            return part
        start, stop = (
            self._number(entry, end) if type(end) is int else end for end in (part.start, part.stop)
        )
        if differs and any(
            type(end) is int and end > 1 and end not in self._new.values() for end in (start, stop)
        ):
            raise UnknownSizeError(entry, f"samples {part.start} to {part.stop}")
        return slice(start, stop, part.step)

"""How much room an operation needs: for what it returns, and for what it takes for itself while it runs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from mempool.torch.swapping.kinds import PLAIN
from traces.recorders.torch.storages import storages_in, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool import _core

#: Runs of an operation with the same shapes whose own memory is measured.
SAMPLES = 2
#: An operation is not asked about beforehand where there is room for so many times what it is given, and it
#: never made more than that. One whose tensors have several shapes, as where they are broadcast, always is.
_AMPLE = 8
#: Operations with their shapes that are remembered at most.
_MOST = 1 << 16
#: What takes much for itself: until it is measured, as much as it is given and makes.
_HUNGRY = ("conv", "rnn", "lstm", "gru")


class Need:
    """What an operation needs when it is given such shapes; bytes.

    Attributes:
        made: what it returns that is new.
        room: what it takes beside, at most; an estimate until it was measured.
        samples: how often it was.
    """

    __slots__ = ("made", "room", "samples")

    def __init__(self, made: int, room: int = 0) -> None:
        self.made, self.room, self.samples = made, room, 0


class Counters:
    """What a pool counts while an operation runs, without disturbing the peaks that others read of it."""

    def __init__(self, client: _core.Client) -> None:
        """Ask the pool's client."""
        self._client = client
        self._live = self._total = 0

    def begin(self) -> None:
        """An operation begins."""
        live = self._client.stats()["live"]
        self._live, self._total = live["current"], live["total"]

    def taken(self) -> int:
        """Bytes that were alive at once since, beside what was alive then, at most.

        No more than all that was allocated since, nor than what the peak so far leaves: each may be more than
        it was, none is less.
        """
        live: dict[str, int] = self._client.stats()["live"]
        return max(min(live["total"] - self._total, live["peak"] - self._live), 0)


class Needs:
    """Needs by operation and shapes.

    What is not known is asked of tensors without memory; where data decide, it is a bound or what was seen.
    """

    def __init__(self, counters: Counters | None = None, alignment: int = 1) -> None:
        """Nothing is known; without counters of a pool the own memory of operations stays unknown."""
        self._counters = counters
        self._alignment = alignment
        self._known: dict[Any, Need] = {}
        self._seen: dict[Any, int] = {}
        self._share: dict[Any, float] = {}
        self._grown: dict[Any, float] = {}  # the most that was made, by what was given

    def of(self, func: Any, args: Any, kwargs: Any, given: int, spare: int) -> Need:
        """What an operation needs.

        Args:
            func: it.
            args: positional arguments.
            kwargs: the others.
            given: bytes of the storages that it is given.
            spare: bytes for which there is room without anything leaving.
        """
        sized = given == 0  # by a number, such as arange; elsewhere they are learning rates and the like
        try:
            key = (func, _part(args, sized), _part(kwargs, sized) if kwargs else None)
            need = self._known.get(key)
        except Exception:  # what has no hash, or no shape: a nested tensor
            return Need(self._asked(func, args, kwargs))
        if need is None:
            if len(self._known) >= _MOST:
                self._known.clear()
            modest = self._grown.get(func, math.inf) <= _AMPLE and _is_even(args)
            ample = modest and 0 < given * _AMPLE <= spare
            made = 0 if ample else self._asked(func, args, kwargs)
            need = self._known[key] = Need(made, self._guessed(func, given + made))
        return need

    def _guessed(self, func: Any, touched: int) -> int:
        """What it may take beside: the same part of what it touches as with other shapes."""
        if self._counters is None:
            return 0
        share = self._share.get(func)
        if share is None:
            share = float(any(part in str(func) for part in _HUNGRY))
        return int(share * touched)

    def begin(self) -> None:
        """An operation begins that is to be measured."""
        if self._counters is not None:
            self._counters.begin()

    def end(self, func: Any, need: Need, given: int, made: int) -> None:
        """Its operation has ended: it was given and made so many bytes."""
        self._grown[func] = max(self._grown.get(func, 0), made / max(given, 1))
        if made > need.made:
            need.made = made
            self._seen[func] = max(self._seen.get(func, 0), made)
        if need.samples < SAMPLES:
            if self._counters is not None:
                room = max(self._counters.taken() - made, 0)
                need.room = min(need.room, room) if need.samples else room
                self._share[func] = max(self._share.get(func, 0), room / max(given + made, 1))
            need.samples += 1

    def _asked(self, func: Any, args: Any, kwargs: Any) -> int:
        """Bytes that it will return, as far as can be told."""
        try:
            return self._rounded(_without_memory(func, args, kwargs))
        except Exception:  # data decide, or nobody has written down how
            bound = _BOUNDS.get(func.name().partition(".")[0]) if hasattr(func, "name") else None
            try:
                return self._seen.get(func, 0) if bound is None else bound(args)
            except Exception:  # arguments of a kind not thought of
                return self._seen.get(func, 0)

    def _rounded(self, sizes: list[int]) -> int:
        unit = self._alignment
        return sum(-(-size // unit) * unit for size in sizes)


def _is_even(args: Any) -> bool:
    """Whether all tensors among these arguments have one shape."""
    return len({value.shape for value in args if isinstance(value, torch.Tensor)}) <= 1


def _part(value: Any, sized: bool) -> Any:  # noqa: FBT001
    """What of an argument decides how much an operation makes; fractions where it is ``sized`` by them."""
    kind = type(value)
    if kind in PLAIN:
        return value.shape, value.dtype, None if value.is_contiguous() else value.stride()
    if kind is tuple or kind is list:
        return tuple([_part(entry, sized) for entry in value])
    if kind is dict:
        return tuple([(name, _part(entry, sized)) for name, entry in value.items()])
    if isinstance(value, torch.Tensor):
        return kind, value.shape, value.dtype
    return kind, None if kind is float and not sized else value


def _without_memory(func: Any, args: Any, kwargs: Any) -> list[int]:
    """Sizes of the new storages that an operation returns, from tensors of the same shapes on no device."""

    def empty(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    with _disable_current_modes(), torch.no_grad():
        args, kwargs = tree_map(empty, (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        given = {id(storage) for tensor in tensors_in((args, kwargs)) for _, storage in storages_in(tensor)}
        made = {id(storage): storage.nbytes() for _, storage in storages_in(func(*args, **kwargs))}
    return [size for key, size in made.items() if key not in given]


def _indices(args: Any) -> int:
    """Of ``nonzero``: int64[numel, dim]."""
    return int(8 * args[0].numel() * max(args[0].dim(), 1))


def _chosen(args: Any) -> int:
    """Of ``masked_select``: every element."""
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return int(args[0].element_size() * shape.numel())


def _distinct(args: Any) -> int:
    """Of ``unique`` and its like: every element, where it lies, and how often."""
    return int((args[0].element_size() + 16) * args[0].numel())


def _indexed(args: Any) -> int:
    """Of ``index`` with masks: every element."""
    return int(args[0].element_size() * args[0].numel())


#: Where data decide how much an operation returns: the most that it can be.
_BOUNDS: dict[str, Callable[[Any], int]] = {
    "aten::nonzero": _indices,
    "aten::masked_select": _chosen,
    "aten::_unique": _distinct,
    "aten::_unique2": _distinct,
    "aten::unique_dim": _distinct,
    "aten::unique_consecutive": _distinct,
    "aten::unique_dim_consecutive": _distinct,
    "aten::index": _indexed,
}

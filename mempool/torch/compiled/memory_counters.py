"""Bytes counted by an allocator: a pool, or PyTorch on a GPU."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import NamedTuple

import torch

#: Divisor of a limit: a rise by less than this fraction of the limit is ignored.
_LITTLE = 64


class Counted(NamedTuple):
    """Bytes of this process's tensors on the device: now, and at the peak."""

    now: int
    most: int


def counted() -> Counted | None:
    """Return the bytes in use and the peak; None if no allocator counts, as on a CPU without a pool."""
    from mempool.torch import installed

    pool = installed()
    if pool is not None:
        requested = pool.client.stats()["requested"]
        return Counted(int(requested["current"]), int(requested["peak"]))
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # a foreign allocator counts nothing
            all_bytes = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
            return Counted(int(all_bytes["current"]), int(all_bytes["peak"]))
    return None


class Ended(NamedTuple):
    """The bytes counted when a run of a graph ended."""

    number: int
    backward: bool
    counted: Counted


@dataclass(eq=False)
class HighWater:
    """The high-water mark while runs are observed and afterwards.

    The mark is never reset, since the mark belongs to the program: only a rise above the mark is visible.

    Attributes:
        most: peak bytes in the steps after the first observed one; 0 where no allocator counts.
    """

    most: int = 0
    _first: int | None = None
    _known: int = 0
    _ended: Ended | None = None

    def opens(self) -> None:
        """Start observing, or restart after another compilation."""
        self.most, self._first, self._ended = 0, None, None

    def begins(self, number: int, *, backward: bool) -> tuple[int, int] | None:
        """Note that a run of a graph begins.

        Returns:
            If the mark rose since the last run: the number of the graph that waited for a backward run, and
                the
            peak bytes in addition to the bytes in use before. Otherwise None.
        """
        there, ended, self._ended = counted(), self._ended, None
        if there is None:
            return None
        if self._first is not None:
            self.most = max(self.most, there.now, there.most if there.most > self._first else 0)
        if ended is None or there.most <= ended.counted.most or (ended.backward and not backward):
            return None  # after a backward run and before a forward run lies the gap between two steps
        return number if ended.backward else ended.number, there.most - ended.counted.now

    def ends(self, number: int, *, backward: bool) -> None:
        """Note that a run has ended."""
        there = counted()
        self._ended = None if there is None else Ended(number, backward, there)

    def steps(self) -> None:
        """Note that an observed step has ended."""
        if self._first is None and (there := counted()) is not None:
            self._first = there.most

    def closes(self) -> None:
        """Stop observing runs."""
        self._known = 0 if (there := counted()) is None else there.most

    def rises(self, limit: int) -> bool:
        """Return true if the mark rose above a limit since the observation ended; true once per rise.

        Small rises are ignored, such as those of a program that slowly collects data.
        """
        there = counted()
        if there is None or there.most <= max(limit, self._known + limit // _LITTLE):
            return False
        self._known = there.most
        return True

"""Bytes that somebody counts: a pool, or PyTorch on a GPU."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import NamedTuple

import torch

#: Such a share of a limit is little.
_LITTLE = 64


class Counted(NamedTuple):
    """Bytes of this process's tensors on the device: now, and the most there were."""

    now: int
    most: int


def counted() -> Counted | None:
    """None where nobody counts, as on a CPU without a pool."""
    from mempool.torch import installed

    pool = installed()
    if pool is not None:
        requested = pool.client.stats()["requested"]
        return Counted(int(requested["current"]), int(requested["peak"]))
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # an allocator of somebody else counts nothing
            all_bytes = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
            return Counted(int(all_bytes["current"]), int(all_bytes["peak"]))
    return None


class Ended(NamedTuple):
    """What was there when a run of a graph had ended."""

    number: int
    backward: bool
    counted: Counted


@dataclass(eq=False)
class HighWater:
    """The high-water mark, while runs of graphs are looked at and after that.

    Nobody sets the mark back, since it is the program's: only what rises above it is seen.

    Attributes:
        most: the most bytes there were in the steps after the first one that was looked at; 0 where nobody
            counts.
    """

    most: int = 0
    _first: int | None = None
    _known: int = 0
    _ended: Ended | None = None

    def opens(self) -> None:
        """Runs are looked at from now on, or something has been compiled since the last one."""
        self.most, self._first, self._ended = 0, None, None

    def begins(self, number: int, *, backward: bool) -> tuple[int, int] | None:
        """A run of this graph begins.

        Returns:
            Where there was more than ever since the last run, the number of the graph that waited for its
            backward run, and the most bytes that were there beside all that was there before.
        """
        there, ended, self._ended = counted(), self._ended, None
        if there is None:
            return None
        if self._first is not None:
            self.most = max(self.most, there.now, there.most if there.most > self._first else 0)
        if ended is None or there.most <= ended.counted.most or (ended.backward and not backward):
            return None  # what comes after a backward run and before a forward one is between two steps
        return number if ended.backward else ended.number, there.most - ended.counted.now

    def ends(self, number: int, *, backward: bool) -> None:
        """A run has ended."""
        there = counted()
        self._ended = None if there is None else Ended(number, backward, there)

    def steps(self) -> None:
        """A step has been looked at."""
        if self._first is None and (there := counted()) is not None:
            self._first = there.most

    def closes(self) -> None:
        """Runs are not looked at any more."""
        self._known = 0 if (there := counted()) is None else there.most

    def rises(self, limit: int) -> bool:
        """Whether there was more than ever since nobody looks, and more than a limit; true once.

        Not for a little more each time, as where a program collects something.
        """
        there = counted()
        if there is None or there.most <= max(limit, self._known + limit // _LITTLE):
            return False
        self._known = there.most
        return True

"""Copies of tensors on the CPU into an arena of their own, by two threads, as a GPU's copy engines do."""

from __future__ import annotations

import itertools
import mmap
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mempool.torch.swapping.engine import HostFullError
from solvers.swap import Link

if TYPE_CHECKING:
    from collections.abc import Callable

_PAGE = 4096


@dataclass(eq=False)
class Copied:
    """Bytes on the host.

    Attributes:
        size: how many.
        at: where in the arena.
        data: them.
        users: transfers that have not ended.
        dropped: nobody wants them any more.
    """

    size: int
    at: int
    data: torch.Tensor
    users: int = 0
    dropped: bool = False


@dataclass(eq=False)
class Moving:
    """A copy that was asked for."""

    size: int
    copied: Copied
    data: torch.Tensor | None
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class HostEngine:
    """Copies between the CPU's tensors and an arena that is mapped page by page as it is used."""

    def __init__(self, host_bytes: int) -> None:
        """Make an engine whose arena has so many bytes."""
        self._map = mmap.mmap(-1, max(host_bytes, _PAGE))
        self._arena = torch.frombuffer(self._map, dtype=torch.uint8)
        self._holes = [(0, len(self._arena))]
        self._queues: list[queue.SimpleQueue[Callable[[], None] | None]] = [
            queue.SimpleQueue() for _ in range(2)
        ]
        self._threads = [
            threading.Thread(target=self._work, args=(q,), name=f"mempool-copy-{name}", daemon=True)
            for q, name in zip(self._queues, ("out", "in"), strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _work(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (task := tasks.get()) is not None:
            task()

    def _ask(self, direction: int, moving: Moving, target: torch.Tensor, source: torch.Tensor) -> None:
        moving.copied.users += 1

        def task() -> None:
            try:
                target.copy_(source)
            except BaseException as error:
                moving.error = error
            moving.ended.set()

        self._queues[direction].put(task)

    def out(self, data: torch.Tensor) -> tuple[Copied, Moving]:
        """Ask for a copy to the host."""
        size = data.numel()
        at = self._take(size)
        copied = Copied(size, at, self._arena[at : at + size])
        moving = Moving(size, copied, data)
        self._ask(0, moving, copied.data, data)
        return copied, moving

    def back(self, copy: Any, data: torch.Tensor) -> Moving:
        """Ask for a copy back."""
        moving = Moving(copy.size, copy, data)
        self._ask(1, moving, data, copy.data)
        return moving

    def wait(self, transfer: Any) -> float:
        """Wait for a copy; seconds waited."""
        waited = 0.0
        if not transfer.ended.is_set():
            began = time.perf_counter()
            transfer.ended.wait()
            waited = time.perf_counter() - began
        if transfer.error is not None:
            raise transfer.error
        if transfer.data is not None:
            transfer.data = None
            transfer.copied.users -= 1
            self._give_if_dropped(transfer.copied)
        return waited

    def drop(self, copy: Any) -> None:
        """Give the host's memory of a copy back."""
        copy.dropped = True
        self._give_if_dropped(copy)

    def _give_if_dropped(self, copied: Copied) -> None:
        if copied.dropped and copied.users == 0:
            self._give(copied.at, copied.size)

    def _take(self, size: int) -> int:
        """The first hole that is large enough."""
        needed = -(-size // _PAGE) * _PAGE
        for i, (at, room) in enumerate(self._holes):
            if room >= needed:
                self._holes[i : i + 1] = [(at + needed, room - needed)] if room > needed else []
                return at
        raise HostFullError(f"no {size} bytes are left on the host")

    def _give(self, at: int, size: int) -> None:
        room = -(-size // _PAGE) * _PAGE
        holes = sorted([*self._holes, (at, room)])
        self._holes = holes[:1]
        for begin, length in holes[1:]:
            last, reach = self._holes[-1]
            if last + reach == begin:
                self._holes[-1] = last, reach + length
            else:
                self._holes.append((begin, length))

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, marks: list[float]) -> list[float]:
        """Seconds between marks."""
        return [after - before for before, after in itertools.pairwise(marks)]

    def link(self) -> Link:
        """What copies take."""
        return Link.of_rate(4e9)

    def close(self) -> None:
        """End the threads."""
        for tasks in self._queues:
            tasks.put(None)
        for thread in self._threads:
            thread.join()

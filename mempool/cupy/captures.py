"""Graphs that CuPy captures: what is allocated on their streams meanwhile stays theirs.

A graph uses the same addresses at every launch, long after the arrays are gone. CuPy tells allocators nothing
of graphs, so ``begin_capture`` and ``end_capture`` of its streams are watched. Nobody says when a graph is
destroyed: its memory is kept until the program says so, or the process ends.
"""

from __future__ import annotations

import functools
import itertools
import threading
from typing import TYPE_CHECKING, Any

from mempool import _core
from mempool.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.pool import Pool

#: The pools with graphs, which may be launched until the process ends.
_with_graphs: set[_core.Pool] = set()
_numbers = itertools.count(1)


class Captures:
    """The captures and graphs of one `CupyPool`."""

    def __init__(self, pool_here: Callable[[], tuple[int, Pool]]) -> None:
        """Nothing captured.

        Args:
            pool_here: index and pool of the current device.
        """
        self._pool_here = pool_here
        self._lock = threading.Lock()
        self._going_on: dict[int, tuple[_core.Pool, int, int]] = {}  # by the stream's handle
        self._before: dict[tuple[Any, str], Any] = {}
        self._graphs: list[tuple[_core.Pool, int]] = []

    def watch(self) -> None:
        """From now on."""
        for kind in _streams():
            for name, around in (("begin_capture", self._beginning), ("end_capture", self._ending)):
                self._before[kind, name] = kind.__dict__.get(name)  # none: it is inherited
                setattr(kind, name, around(getattr(kind, name)))

    def stop(self) -> None:
        """CuPy's streams are as before.

        Raises:
            UsageError: a graph is being captured.
        """
        if self._going_on:
            raise UsageError("a graph is being captured: end_capture() first")
        for (kind, name), before in self._before.items():
            if getattr(kind.__dict__.get(name), "_mempool", None) is not self:
                continue  # somebody has put something else there
            if before is None:
                delattr(kind, name)
            else:
                setattr(kind, name, before)

    def renew_lock(self) -> None:
        """In a forked child, where nobody is left who could give it back."""
        self._lock = threading.Lock()

    def release(self) -> None:
        """All graphs captured so far are gone."""
        with self._lock:
            kept = [(pool, number) for pool, number, _ in self._going_on.values()]
            graphs, self._graphs = self._graphs, kept
        for pool, number in graphs:
            if (pool, number) not in kept:
                _core.cupy_release_capture(pool, number)
        for pool, _ in graphs:
            if pool not in [still for still, _ in kept]:
                _with_graphs.discard(pool)

    def going_on(self, pool: _core.Pool) -> bool:
        """Whether a graph is being captured on the device of this pool."""
        with self._lock:
            return any(pool is other for other, _, _ in self._going_on.values())

    def begin(self, stream: int) -> None:
        """What is asked for on streams of the capture that begins on this one belongs to its graph."""
        index, pool = self._pool_here()
        number = next(_numbers)
        with self._lock:
            if stream in self._going_on:
                return  # CuPy says what is wrong
            index = index if isinstance(pool.device, _core.CudaDevice) else -1
            self._going_on[stream] = pool.core, number, index
            self._graphs.append((pool.core, number))
            _with_graphs.add(pool.core)
            _core.cupy_begin_capture(pool.core, number, index)

    def end(self, stream: int) -> None:
        """It is over, one way or another."""
        with self._lock:
            found = self._going_on.pop(stream, None)
        if found is not None:
            _core.cupy_end_capture(*found)

    def _beginning(self, plain: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(plain)
        def begin_capture(stream: Any, *args: Any, **options: Any) -> None:
            if stream.ptr in self._going_on:
                return plain(stream, *args, **options)
            self.begin(stream.ptr)
            try:
                plain(stream, *args, **options)
            except BaseException:
                self.end(stream.ptr)
                raise

        begin_capture._mempool = self  # type: ignore[attr-defined]
        return begin_capture

    def _ending(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def end_capture(stream: Any) -> Any:
            try:
                return plain(stream)
            finally:
                self.end(stream.ptr)

        end_capture._mempool = self  # type: ignore[attr-defined]
        return end_capture


def _streams() -> tuple[Any, Any]:
    import cupy

    return cupy.cuda.Stream, cupy.cuda.ExternalStream

"""Captures of CUDA graphs in CuPy: memory allocated on captured streams stays with the graph.

A graph uses the same addresses at every launch, even after its arrays' end. CuPy does not report graphs to
allocators, so the functions that begin and end captures are patched: methods of CuPy's streams, and functions
of ``cupy.cuda.runtime``. The driver reports the streams of each capture. The end of a graph cannot be
observed, so its memory is kept until the program releases the graph or the process ends.
"""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mempool import _core
from mempool.errors import UsageError
from mempool.streams import stream_number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mempool.pool import Pool

#: Pools with graphs, kept alive for later launches.
_with_graphs: set[_core.Pool] = set()


@dataclass(eq=False)
class _Capture:
    """A capture that was in progress at the last check.

    Attributes:
        graph: the driver's number of the capture.
        stream: the core's number of the stream on which the capture began.
        asked: pool of the current device at the beginning, which queries the driver.
        exists: function that returns None after the stream's end.
        of: owner of the graph's memory after the capture.
        pools: pools that serve the capture.
    """

    graph: int
    stream: int
    asked: _core.Pool
    exists: Callable[[], Any]
    of: Captures
    pools: list[_core.Pool] = field(default_factory=list)

    def join(self, pool: _core.Pool) -> None:
        """Assign the pool's allocations on captured streams to the graph."""
        if pool not in self.pools:
            _core.cupy_begin_capture(pool, self.graph)
            self.pools.append(pool)
            _with_graphs.add(pool)

    def goes_on(self) -> bool:
        """Return true if the capture is in progress; false if it has failed or the stream is gone."""
        return self.exists() is not None and _core.cupy_goes_on(self.asked, self.graph, self.stream)


#: Captures in progress in this process, of any pool.
_going_on: list[_Capture] = []
_lock = threading.Lock()


class Captures:
    """Captures and graphs of one `CupyPool`."""

    def __init__(
        self, pool_here: Callable[[], tuple[int, Pool]], pools: Callable[[], dict[int, Any]]
    ) -> None:
        """Start without captures.

        Args:
            pool_here: returns index and pool of the current device.
            pools: returns all pools by device index.
        """
        self._pool_here, self._pools = pool_here, pools
        self._before: dict[tuple[Any, str], Any] = {}
        self._graphs: list[tuple[_core.Pool, int]] = []
        self._leaving = False

    def watch(self) -> None:
        """Patch CuPy's functions that begin and end captures."""
        self.settle()
        self._leaving = False
        for kind, begin, end, owns in _watched():
            for name, around in ((begin, self._beginning), (end, self._ending)):
                self._before[kind, name] = vars(kind).get(name)  # None if inherited
                setattr(kind, name, around(getattr(kind, name), owns=owns))

    def stop(self, *, anyhow: bool = False) -> None:
        """Restore CuPy's functions; `anyhow`: during a capture, postpone that to the last capture's end.

        Raises:
            UsageError: a graph is being captured, and ``anyhow`` is false.
        """
        self.settle()
        with _lock:
            self._leaving = any(capture.of is self for capture in _going_on)
        if not self._leaving:
            self._restore()
        elif not anyhow:
            self._leaving = False
            raise UsageError("a graph is being captured: end_capture() first")

    def _restore(self) -> None:
        for (kind, name), before in self._before.items():
            if getattr(vars(kind).get(name), "_mempool", None) is not self:
                continue  # patched by other code meanwhile
            if before is None:
                delattr(kind, name)
            else:
                setattr(kind, name, before)

    def renew_lock(self) -> None:
        """Replace the lock in a forked child, which lacks the lock's owner."""
        global _lock
        _lock = threading.Lock()

    def release(self) -> None:
        """Release the memory of all graphs captured so far."""
        self.settle()
        with _lock:
            graphs, self._graphs = self._graphs, []
            kept = {pool for capture in _going_on for pool in capture.pools}
        for pool, graph in graphs:
            _core.cupy_release_capture(pool, graph)
        _with_graphs.difference_update({pool for pool, _ in graphs} - kept)

    def going_on(self, pool: _core.Pool) -> bool:
        """Return true if a capture that this pool serves is in progress."""
        self.settle()
        with _lock:
            return any(pool in capture.pools for capture in _going_on)

    def join(self, pool: _core.Pool) -> None:
        """Add a new pool to all captures in progress, which may extend to the device."""
        with _lock:
            for capture in _going_on:
                capture.join(pool)

    def settle(self, *, wait: bool = True) -> None:
        """Handle the end of completed or failed captures; `wait`: wait for the lock."""
        lock = _lock
        if not _going_on or not lock.acquire(blocking=wait):
            return
        try:
            over = [capture for capture in _going_on if not capture.goes_on()]
            _going_on[:] = [capture for capture in _going_on if capture not in over]
            for capture in over:
                for pool in capture.pools:
                    _core.cupy_end_capture(pool, capture.graph)
                _core.cupy_release_devices()
                capture.of._graphs += [(pool, capture.graph) for pool in capture.pools]
            left = {capture.of for capture in over if capture.of._leaving} - {one.of for one in _going_on}
        finally:
            lock.release()
        for captures in left:
            captures._restore()

    def _begin(self, stream: Any, plain: Callable[[], None], *, owns: bool) -> None:
        name, pool = stream_number(int(getattr(stream, "ptr", stream))), self._pool_here()[1].core
        _core.cupy_hold_devices()
        try:
            plain()
            graph = _core.cupy_capture(pool, name)
        except BaseException:
            _core.cupy_release_devices()
            raise
        gone = functools.partial(_settle_now, weakref.ref(self))
        exists = weakref.ref(stream, gone) if owns else lambda: stream
        capture = _Capture(graph, name, pool, exists, self)
        with _lock:
            known = graph == 0 or any(graph == one.graph for one in _going_on)
            if not known:
                _going_on.append(capture)
                capture.join(pool)
        if known:
            _core.cupy_release_devices()
        for each in self._pools().values():  # all devices, whose streams may join the capture
            self.join(each.core)

    def _beginning(self, plain: Callable[..., None], *, owns: bool) -> Callable[..., None]:
        @functools.wraps(plain)
        def begin_capture(stream: Any, *args: Any, **options: Any) -> None:
            self.settle()
            self._begin(stream, functools.partial(plain, stream, *args, **options), owns=owns)

        begin_capture._mempool = self  # type: ignore[attr-defined]
        return begin_capture

    def _ending(self, plain: Callable[..., Any], *, owns: bool) -> Callable[..., Any]:  # noqa: ARG002
        @functools.wraps(plain)
        def end_capture(stream: Any) -> Any:
            try:
                return plain(stream)
            finally:
                self.settle()

        end_capture._mempool = self  # type: ignore[attr-defined]
        return end_capture


def _settle_now(captures: weakref.ref[Captures], _: Any) -> None:
    """Settle captures at a stream's end, possibly during a garbage collection."""
    if (one := captures()) is not None:
        one.settle(wait=False)


def _watched() -> Iterator[tuple[Any, str, str, bool]]:
    """Yield (class or module, names of begin and end, true if the object owns the stream)."""
    import cupy.cuda.runtime as public  # copies the other module's names on import
    from cupy.cuda import ExternalStream, Stream
    from cupy_backends.cuda.api import runtime

    yield Stream, "begin_capture", "end_capture", True
    yield ExternalStream, "begin_capture", "end_capture", False
    for module in dict.fromkeys((runtime, public)):
        yield module, "streamBeginCapture", "streamEndCapture", False

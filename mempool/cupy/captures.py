"""Graphs that CuPy captures: what is allocated on their streams meanwhile stays theirs.

A graph uses the same addresses at every launch, long after the arrays are gone. CuPy tells allocators nothing
of graphs, so the functions that begin and end captures are watched: those of its streams, and those of
``cupy.cuda.runtime``. Which streams are part of a capture, and of which, the driver says. Nobody says when a
graph is destroyed: its memory is kept until the program says so, or the process ends.
"""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mempool import _core
from mempool.errors import UsageError
from mempool.streams import number

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mempool.pool import Pool

#: The pools with graphs, which may be launched until the process ends.
_with_graphs: set[_core.Pool] = set()


@dataclass(eq=False)
class _Capture:
    """A capture that goes on, or did when it was last looked at.

    Attributes:
        graph: the driver's number of it.
        stream: where it began, as the core calls it.
        asked: a pool of the device that was current then.
        exists: whether the stream does, as far as that is known here.
        of: who is to keep its memory when it is over.
        pools: those that serve it.
    """

    graph: int
    stream: int
    asked: _core.Pool
    exists: Callable[[], Any]
    of: Captures
    pools: list[_core.Pool] = field(default_factory=list)

    def join(self, pool: _core.Pool) -> None:
        """What is asked of this pool on streams of the capture belongs to the graph."""
        if pool not in self.pools:
            _core.cupy_begin_capture(pool, self.graph)
            self.pools.append(pool)
            _with_graphs.add(pool)

    def goes_on(self) -> bool:
        """Whether it does. Nobody says so of one that has failed, or whose stream is gone."""
        return self.exists() is not None and _core.cupy_goes_on(self.asked, self.graph, self.stream)


#: Those of the process that go on, whichever pool was installed when they began.
_going_on: list[_Capture] = []
_lock = threading.Lock()


class Captures:
    """The captures and graphs of one `CupyPool`."""

    def __init__(
        self, pool_here: Callable[[], tuple[int, Pool]], pools: Callable[[], dict[int, Any]]
    ) -> None:
        """Nothing captured.

        Args:
            pool_here: index and pool of the current device.
            pools: all that there are.
        """
        self._pool_here, self._pools = pool_here, pools
        self._before: dict[tuple[Any, str], Any] = {}
        self._graphs: list[tuple[_core.Pool, int]] = []
        self._leaving = False

    def watch(self) -> None:
        """From now on."""
        self.settle()
        self._leaving = False
        for kind, begin, end, owns in _watched():
            for name, around in ((begin, self._beginning), (end, self._ending)):
                self._before[kind, name] = vars(kind).get(name)  # none: it is inherited
                setattr(kind, name, around(getattr(kind, name), owns=owns))

    def stop(self, *, anyhow: bool = False) -> None:
        """CuPy's streams are as before; ``anyhow``: once the last capture is over.

        Raises:
            UsageError: a graph is being captured.
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
                continue  # somebody has put something else there
            if before is None:
                delattr(kind, name)
            else:
                setattr(kind, name, before)

    def renew_lock(self) -> None:
        """In a forked child, where nobody is left who could give it back."""
        global _lock
        _lock = threading.Lock()

    def release(self) -> None:
        """All graphs captured so far are gone."""
        self.settle()
        with _lock:
            graphs, self._graphs = self._graphs, []
            kept = {pool for capture in _going_on for pool in capture.pools}
        for pool, graph in graphs:
            _core.cupy_release_capture(pool, graph)
        _with_graphs.difference_update({pool for pool, _ in graphs} - kept)

    def going_on(self, pool: _core.Pool) -> bool:
        """Whether a graph is being captured that this pool serves."""
        self.settle()
        with _lock:
            return any(pool in capture.pools for capture in _going_on)

    def join(self, pool: _core.Pool) -> None:
        """A new pool: what goes on may come to its device."""
        with _lock:
            for capture in _going_on:
                capture.join(pool)

    def settle(self, *, wait: bool = True) -> None:
        """See which captures are over, one way or another; ``wait``: for who is at that."""
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
        name, pool = number(int(getattr(stream, "ptr", stream))), self._pool_here()[1].core
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
        for each in self._pools().values():  # of all devices, whose streams may join
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
    """A stream is gone, in whatever moment."""
    if (one := captures()) is not None:
        one.settle(wait=False)


def _watched() -> Iterator[tuple[Any, str, str, bool]]:
    """Where captures begin and end, by which names, and whether the stream goes with its object."""
    import cupy.cuda.runtime as public  # which copies the other's names when it is first imported
    from cupy.cuda import ExternalStream, Stream
    from cupy_backends.cuda.api import runtime

    yield Stream, "begin_capture", "end_capture", True
    yield ExternalStream, "begin_capture", "end_capture", False
    for module in dict.fromkeys((runtime, public)):
        yield module, "streamBeginCapture", "streamEndCapture", False

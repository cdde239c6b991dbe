"""Support for other threads and for forked processes: the storages that they touch are reloaded."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from concurrent.futures.thread import _WorkItem
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

from mempool.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.torch.eager.mode import Swapper

#: Name prefix of this project's threads, which copy storages.
OWN = "mempool-"
#: Name prefix of executor threads, whose work items are wrapped one by one.
_WORKER = "ThreadPoolExecutor-"
#: Name prefix of the thread that draws progress bars.
_PROGRESS = "tqdm_monitor"


class Beside(TorchDispatchMode):
    """Dispatch mode of other threads: lends arguments while an operation runs, and follows no plan."""

    supports_higher_order_operators = True

    def __init__(self, swapper: Swapper) -> None:
        super().__init__()
        self._swapper = swapper

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, swapper = kwargs or {}, self._swapper
        if (passes := swapper.passes(types)) is not None:
            return NotImplemented if passes else func(*args, **kwargs)
        kind = swapper.kind(func)
        if kind.asks:
            return func(*args, **kwargs)
        swapper.counts.beside += 1
        keeps = kind.odd is not None and kind.odd.keeps
        with swapper.escapes.lent((*args, *kwargs.values()), writes=kind.writes) as lent:
            if swapper.storages.device != "cpu" or keeps:  # the thread may use another stream
                for held, _ in lent:
                    swapper.mover.keep(held)
            return func(*args, **kwargs)


def inside(swapper: Swapper, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function under mode `Beside` and return the result."""
    _push_mode(Beside(swapper))  # no `with` block: PyTorch's flags for that are shared by all threads
    try:
        return function(*args, **kwargs)
    finally:
        _pop_mode()


def _run(swapper: weakref.ref[Swapper], run: Callable[[], None]) -> None:
    if (alive := swapper()) is None:
        run()
    else:
        inside(alive, run)


class Threads:
    """Runs threads started while swapping under mode `Beside`, and lets a forked child go on alone."""

    def __init__(self, swapper: Swapper) -> None:
        self._swapper = weakref.ref(swapper)
        self._before: Any = None
        self._item: Any = None

    def install(self) -> None:
        """Wrap the start of threads and executor work, and register for forks."""
        self._before = before = threading.Thread.start
        swapper = self._swapper

        @functools.wraps(before)
        def start(thread: threading.Thread) -> None:
            if not thread.name.startswith(OWN):
                thread.run = functools.partial(_run, swapper, thread.run)  # type: ignore[method-assign]
            before(thread)

        self._item = item = _WorkItem.run

        @functools.wraps(item)
        def run(work: Any) -> None:  # the worker thread may be older than the swapping
            if isinstance(_get_current_dispatch_mode(), Beside):
                item(work)
            else:
                _run(swapper, functools.partial(item, work))

        _WorkItem.run = run  # type: ignore[assignment,method-assign]
        _warn_of_older()
        threading.Thread.start = start  # type: ignore[assignment,method-assign]
        if (alive := swapper()) is not None:
            _forking.add(alive)

    def remove(self) -> None:
        """Undo `install`."""
        threading.Thread.start = self._before  # type: ignore[method-assign]
        _WorkItem.run = self._item  # type: ignore[method-assign]
        if (alive := self._swapper()) is not None:
            _forking.discard(alive)


def _warn_of_older() -> None:
    mine = threading.current_thread()
    others = (OWN, _WORKER, _PROGRESS)
    older = [t.name for t in threading.enumerate() if t is not mine and not t.name.startswith(others)]
    if older:
        log.warning(
            "threads that were there before the limit was set must not use tensors that are swapped: %s; "
            "install the pool before they start",
            ", ".join(sorted(older)),
        )


_forking: weakref.WeakSet[Swapper] = weakref.WeakSet()


def _before_fork() -> None:
    for swapper in list(_forking):
        swapper.mover.lock.acquire()
        swapper.mover.settle_all()


def _after_fork(*, child: bool) -> None:
    for swapper in list(_forking):
        if child:
            swapper.stop()
        swapper.mover.lock.release()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=functools.partial(_after_fork, child=False),
    after_in_child=functools.partial(_after_fork, child=True),
)

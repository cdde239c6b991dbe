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

    from mempool.torch.eager.mode import OffloadMode

#: Name prefix of this project's threads, which copy storages.
OWN = "mempool-"
#: Name prefix of executor threads, whose work items are wrapped one by one.
_WORKER = "ThreadPoolExecutor-"
#: Name prefix of the thread that draws progress bars.
_PROGRESS = "tqdm_monitor"


class LendingMode(TorchDispatchMode):
    """Dispatch mode of other threads: lends arguments while an operation runs, and follows no plan."""

    supports_higher_order_operators = True

    def __init__(self, mode: OffloadMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, mode = kwargs or {}, self._mode
        if (passes := mode.traits.skips(types)) is not None:
            return NotImplemented if passes else func(*args, **kwargs)
        traits = mode.traits.of(func)
        if traits.asks:
            return func(*args, **kwargs)
        mode.counts.beside += 1
        keeps = traits.effects is not None and traits.effects.keeps
        with mode.patches.lent((*args, *kwargs.values()), writes=traits.writes) as lent:
            if mode.storages.device != "cpu" or keeps:  # the thread may use another stream
                for record, _ in lent:
                    mode.transfers.hold_resident(record)
            return func(*args, **kwargs)


def run_lending(mode: OffloadMode, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a function under mode `LendingMode` and return the result."""
    _push_mode(LendingMode(mode))  # no `with` block: PyTorch's flags for that are shared by all threads
    try:
        return function(*args, **kwargs)
    finally:
        _pop_mode()


def _run(mode: weakref.ref[OffloadMode], run: Callable[[], None]) -> None:
    if (alive := mode()) is None:
        run()
    else:
        run_lending(alive, run)


class ThreadPatches:
    """Runs threads started while swapping under mode `LendingMode`, and lets a forked child go on alone."""

    def __init__(self, mode: OffloadMode) -> None:
        self._mode = weakref.ref(mode)
        self._thread_start: Any = None
        self._work_item_run: Any = None

    def install(self) -> None:
        """Wrap the start of threads and executor work, and register for forks."""
        self._thread_start = before = threading.Thread.start
        mode = self._mode

        @functools.wraps(before)
        def start(thread: threading.Thread) -> None:
            if not thread.name.startswith(OWN):
                thread.run = functools.partial(_run, mode, thread.run)  # type: ignore[method-assign]
            before(thread)

        self._work_item_run = item = _WorkItem.run

        @functools.wraps(item)
        def run(work: Any) -> None:  # the worker thread may be older than the swapping
            if isinstance(_get_current_dispatch_mode(), LendingMode):
                item(work)
            else:
                _run(mode, functools.partial(item, work))

        _WorkItem.run = run  # type: ignore[assignment,method-assign]
        _warn_of_older()
        threading.Thread.start = start  # type: ignore[assignment,method-assign]
        if (alive := mode()) is not None:
            _forking.add(alive)

    def remove(self) -> None:
        """Undo `install`."""
        threading.Thread.start = self._thread_start  # type: ignore[method-assign]
        _WorkItem.run = self._work_item_run  # type: ignore[method-assign]
        if (alive := self._mode()) is not None:
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


_forking: weakref.WeakSet[OffloadMode] = weakref.WeakSet()


def _before_fork() -> None:
    for mode in list(_forking):
        mode.transfers.lock.acquire()
        mode.transfers.wait_all()


def _after_fork(*, child: bool) -> None:
    for mode in list(_forking):
        if child:
            mode.stop()
        mode.transfers.lock.release()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=functools.partial(_after_fork, child=False),
    after_in_child=functools.partial(_after_fork, child=True),
)

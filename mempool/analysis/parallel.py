"""Parallel execution of a task per file, by any executor: processes of this machine, or a cluster."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

R = TypeVar("R")


def each(
    files: Sequence[str], task: Callable[[str], R], executor: Executor | None = None
) -> Iterator[tuple[str, R | Exception]]:
    """Run a task for each file; yield file and result, or the raised exception, as soon as known.

    Args:
        files: different paths, as the workers see them.
        task: the function to call; must be picklable, unless the executor does not need that.
        executor: the workers; None for processes of this machine, one per core. There, a process that dies
            (for lack of memory, say) breaks the work of the others; the lost files are then done again, each
            in a process of its own, so that only the file at fault fails.
    """
    if executor is not None:
        yield from _through(executor, files, task)
        return
    left = dict.fromkeys(files)
    with _processes(min(len(files), cores())) as pool:
        for file, result in _through(pool, files, task):
            if not isinstance(result, BrokenProcessPool):
                del left[file]
                yield file, result
    for file in left:
        with _processes(1) as alone:
            yield from _through(alone, [file], task)


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def _processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """Start worker processes; an exception, such as Ctrl-C, ends them in the middle of their work."""
    others = set(active_children())
    # Spawned, not forked: a forked child would lack the threads of this project and of Arrow.
    pool = ProcessPoolExecutor(max(count, 1), mp_context=get_context("spawn"), initializer=_begin)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(active_children()) - others:
            process.terminate()
        raise
    pool.shutdown()


def _begin() -> None:
    """Initialize a worker process: ignore Ctrl-C, which the parent handles, and end with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _through(
    executor: Executor, files: Sequence[str], task: Callable[[str], R]
) -> Iterator[tuple[str, R | Exception]]:
    futures = {executor.submit(task, file): file for file in files}
    try:
        for future in as_completed(futures):
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            yield futures[future], future.result() if error is None else error
    finally:
        for future in futures:
            future.cancel()

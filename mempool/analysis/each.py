"""One task a file, many files at once, by any executor: processes of this machine, or a cluster."""

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
    """Do a task for each of different files; yield file and result, or what was raised, as they become known.

    Args:
        files: paths, as those who do the work see them.
        task: what to do; it can be pickled, unless the executor does not need that.
        executor: who does the work; processes of this machine, one a core, if None. A process that dies (of
            a lack of memory, say) takes the others' work with it there, which is then done again, each file
            by itself, so that only the one that it dies of fails.
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
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def _processes(count: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes; an exception, such as Ctrl-C, ends them in the middle of what they do."""
    others = set(active_children())
    # Not forked: threads of ours, or of Arrow's, would be missing there.
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
    """In a new process: Ctrl-C is for its parent, and it does not outlive that, whatever ends it."""
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

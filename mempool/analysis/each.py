"""One task a file, many files at once, by any executor: processes of this machine, or a cluster."""

from __future__ import annotations

import os
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
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


def _processes(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        max(count, 1), mp_context=get_context("spawn")
    )  # a fork would copy our threads


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

"""Comparison of allocators on many traces, in parallel processes."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context, parent_process
from typing import TYPE_CHECKING, TypeVar

from mempool.analysis.caveats import caveats
from mempool.analysis.compare import AllocatorSpec, FailedComparison, Row, compare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@dataclass(frozen=True)
class FileComparison:
    """Result of one file.

    Attributes:
        file: path of the file.
        rows: as `mempool.analysis.compare.compare` yields them.
        caveats: the sentences of `mempool.analysis.caveats`, by device.
        skipped: number of omitted events, by reason; None if the first bad event raises an error.
        error: a line about the reason for missing rows, or None.
    """

    file: str
    rows: tuple[Row | FailedComparison, ...] = ()
    caveats: dict[int, list[str]] = field(default_factory=dict)
    skipped: Counter[str] | None = None
    error: str | None = None


def compare_files(
    files: Sequence[str],
    allocators: Sequence[AllocatorSpec] | None = None,
    *,
    limit_bytes: int | None = None,
    lenient: bool = False,
    on_activity: Callable[[str], object] = lambda _: None,
) -> Iterator[FileComparison]:
    """Compare allocators on many files; yield each file as soon as ready.

    A file that is no trace, or that crashes a process, gives an error without effect on other files.

    Args:
        files: different paths; traces in any format.
        allocators: as for `compare`.
        limit_bytes: as for `compare`.
        lenient: omit impossible events.
        on_activity: for a single file, which is compared in this process; called with the present activity.
    """
    task = functools.partial(compare_file, allocators=allocators, limit_bytes=limit_bytes, lenient=lenient)
    if len(files) == 1:
        yield task(files[0], on_activity=on_activity)
        return
    for file, result in map_files(files, task):
        if isinstance(result, FileComparison):
            yield result
        else:
            reason = " ".join(str(result).split())[:200]
            yield FileComparison(file, error=f"{file}: {type(result).__name__}: {reason}")


def compare_file(
    file: str,
    *,
    allocators: Sequence[AllocatorSpec] | None,
    limit_bytes: int | None,
    lenient: bool,
    on_activity: Callable[[str], object] = lambda _: None,
) -> FileComparison:
    """Compare allocators on one file; the result contains errors of the file."""
    from traces.read import read

    skipped = Counter[str]() if lenient else None
    try:
        trace = read(
            file,
            skipped=skipped,
            progress=lambda done, total: on_activity(f"reading, {done / max(total, 1):.0%}"),
        )
        rows = compare(
            trace,
            allocators,
            limit_bytes=limit_bytes,
            on_allocator=lambda name: on_activity(f"simulating {name}"),
        )
        known = {device: caveats(trace.on_device(device), device) for device in trace.devices}
        return FileComparison(file, tuple(rows), known, skipped)
    except MemoryError:
        return FileComparison(file, error=f"{file}: out of memory")
    except OSError as error:
        return FileComparison(file, error=f"{file}: {error.strerror or error}")
    except ValueError as error:
        text = str(error)
        return FileComparison(file, error=text if text.startswith(file) else f"{file}: {text}")


R = TypeVar("R")


def map_files(files: Sequence[str], task: Callable[[str], R]) -> Iterator[tuple[str, R | Exception]]:
    """Run a task for each file; yield file and result, or the raised exception, as soon as known.

    The workers are processes, one per core. If a process dies, for example for lack of memory, the other
    workers' files are lost, too. Each lost file is then repeated in a separate process, so that only the file
    at fault fails.

    Args:
        files: different paths.
        task: the function to call; must be picklable.
    """
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
    """Initialize a worker process: ignore Ctrl-C, which the parent handles, and end after the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _through(
    pool: ProcessPoolExecutor, files: Sequence[str], task: Callable[[str], R]
) -> Iterator[tuple[str, R | Exception]]:
    futures = {pool.submit(task, file): file for file in files}
    try:
        for future in as_completed(futures):
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            yield futures[future], future.result() if error is None else error
    finally:
        for future in futures:
            future.cancel()

"""Worker thread for native kernels that check no limits, so that the calling thread can check them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from solvers._core import Cancel

if TYPE_CHECKING:
    from collections.abc import Callable

    from solvers.packing.task import Task

T = TypeVar("T")

#: Number of jobs up to which a kernel ends soon enough to run on the calling thread without missing a limit.
_SOON = 20_000
#: Seconds between two checks of the limits.
_PAUSE = 0.01


def aside(task: Task, work: Callable[[Cancel], T], *, wait_for_first: bool = True) -> T | None:
    """Return the result of the work, or None if a limit was reached first (see `Task.stopped_by`).

    By default, work for the first plan is stopped by Ctrl-C only. Abandoned work ends soon, at the latest
    when Python exits and joins the thread.

    Args:
        task: the task whose limits apply.
        work: called with a cancellation flag; must release the GIL.
        wait_for_first: ignore limits until the task has a plan.

    Raises:
        KeyboardInterrupt: the user interrupted the wait.
        Exception: any exception that the work raises.
    """
    cancel = Cancel()
    if len(task.jobs) <= _SOON:
        return work(cancel)
    results, errors = list[T](), list[BaseException]()
    ended = threading.Event()  # Ctrl-C in Thread.join() would make Python believe that the thread has ended

    def run() -> None:
        try:
            results.append(work(cancel))
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    threading.Thread(target=run, name="packing").start()
    try:
        while not ended.wait(_PAUSE):
            if (task.offsets is not None or not wait_for_first) and task.done(of_nodes=False):
                cancel.cancel()
                return None
    except BaseException:
        cancel.cancel()
        raise
    if errors:
        raise errors[0]
    return results[0]

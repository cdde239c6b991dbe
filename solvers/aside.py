"""Native work that looks at no limit, on a thread of its own, so that this one can."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from solvers._core import Cancel

if TYPE_CHECKING:
    from collections.abc import Callable

    from solvers.task import Task

T = TypeVar("T")

#: So few jobs are done with before a limit could be missed.
_SOON = 20_000
#: Seconds between two looks at the limits.
_PAUSE = 0.01


def aside(task: Task, work: Callable[[Cancel], T], *, wait_for_first: bool = True) -> T | None:
    """What the work returns, or None where a limit was reached first; `Task.stopped_by` then says which.

    Work for the first plan is stopped by Ctrl-C only, unless nobody waits for one. Work that is given up ends
    soon, or is waited for when Python ends.

    Args:
        task: tells the limits.
        work: called with what tells it to give up; runs without the interpreter's lock.
        wait_for_first: whether limits count only when there is a plan.

    Raises:
        KeyboardInterrupt: meanwhile.
        Exception: what the work raises.
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

"""The recorder that records, and what watched arrays do without one."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

from traces.errors import TraceError
from traces.recorders.arrays.operands import Operands

if TYPE_CHECKING:
    from collections.abc import Callable

    from traces.recorders.arrays.recorder import ArrayRecorder
    from traces.recorders.arrays.rules import Rule

_lock = threading.Lock()
#: The one that records now: one in a process, whatever the thread.
recorder: ArrayRecorder | None = None


def enter(new: ArrayRecorder) -> None:
    """Begin to record.

    Raises:
        TraceError: somebody does already.
    """
    global recorder
    with _lock:
        if recorder is not None:
            raise TraceError("arrays are being recorded already, and by one recorder at a time")
        recorder = new


def leave() -> None:
    """Record no more."""
    global recorder
    with _lock:
        recorder = None


def _leave_to_the_parent() -> None:
    global recorder, _lock
    _lock = threading.Lock()
    if recorder is not None:
        recorder.leave_to_the_parent()
        recorder = None


os.register_at_fork(after_in_child=_leave_to_the_parent)


def operate(
    name: str,
    call: Callable[..., Any],
    args: Any,
    kwargs: Any,
    rule: Rule,
    also: frozenset[int] | None = frozenset(),
) -> Any:
    """Do an operation, recorded if anybody records: see `ArrayRecorder.operation`."""
    now = recorder
    if now is not None:
        return now.operation(name, call, args, kwargs, rule, also)
    operands = Operands()
    return operands.original(call(*operands.plain(args), **operands.plain(kwargs)))

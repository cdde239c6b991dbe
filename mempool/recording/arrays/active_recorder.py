"""The active recorder, and the behaviour of watched arrays without a recorder."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Protocol

from mempool.recording.arrays.operands import Operands
from traces.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.recording.arrays.rules import Rule


class Recorder(Protocol):
    """Interface of `ArrayRecorder` for watched arrays and replaced functions."""

    def operation(
        self,
        name: str,
        call: Callable[..., Any],
        args: Any,
        kwargs: Any,
        rule: Rule,
        also: frozenset[int] | None,
    ) -> Any:
        """Perform and record an operation."""

    def escape(self, array: Any) -> None:
        """Record a plain view of a watched array."""

    def note(self, name: str, reads: list[Any], result: Any) -> None:
        """Record an operation that has read arrays."""

    def watched(self, operands: Operands, result: Any, writes: list[Any]) -> Any:
        """Return the result of an operation with watched arrays."""

    def leave_to_the_parent(self) -> None:
        """Record no more in a forked child."""


_lock = threading.Lock()
#: The active recorder: at most one in a process, for all threads.
recorder: Recorder | None = None


def enter(new: Recorder) -> None:
    """Activate a recorder.

    Raises:
        TraceError: another recorder is active.
    """
    global recorder
    with _lock:
        if recorder is not None:
            raise TraceError("arrays are being recorded already, and by one recorder at a time")
        recorder = new


def leave() -> None:
    """Deactivate the recorder."""
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
    """Perform an operation, recorded if a recorder is active: see `ArrayRecorder.operation`."""
    now = recorder
    if now is not None:
        return now.operation(name, call, args, kwargs, rule, also)
    operands = Operands()
    return operands.original(call(*operands.plain(args), **operands.plain(kwargs)))

"""Steps from traces with accesses: circular if the trace has whole iterations, else linear."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from solvers.errors import PlanError
from solvers.swap.step import Step
from traces.trace import EventType

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from traces.trace import Trace

_NEVER = np.iinfo(np.int64).max


def step_of(
    trace: Trace,
    *,
    window: tuple[int, int] | None = None,
    whole: bool = False,
    bandwidth: float | None = None,
    seconds: Callable[[Step], NDArray[np.float64]] | None = None,
) -> Step:
    """Return the step of a trace.

    Successive events with the same name and time form one operation. If times belong to events instead of
    operations, successive events of one name without an allocation in between form one operation; its working
    set is at least that of the true operation. An operation lasts until the next operation begins.

    Args:
        trace: a trace with reads and writes, of one device.
        window: rows [first, end) of the iteration; by default the second-last iteration between the trace's
            marks (the last one shows later frees), or the only iteration.
        whole: take all events on a line.
        bandwidth: bytes per second; the duration of each operation is its accessed bytes divided by this
            rate, instead of the recorded time.
        seconds: function that returns the seconds of each operation of the step, instead of the recorded
            times.

    Raises:
        PlanError: the trace has no accesses, or all times are equal or meaningless (metadata ``clock`` is
            "none") and neither ``bandwidth`` nor ``seconds`` is given.
        TraceError: the trace contradicts itself.
    """
    trace.validate()
    if not ((trace.kind == EventType.READ) | (trace.kind == EventType.WRITE)).any():
        raise PlanError(
            "the trace has no reads and writes, so that nothing tells what could be away when; "
            "`mempool run --record TRACE --accesses` records PyTorch's"
        )
    ops = _operations(trace)
    if window is None and not whole:
        window = iteration_of(trace)
    rows = (0, len(trace)) if window is None or whole else window
    step = _cut(trace, ops, rows, circular=window is not None and not whole)
    if seconds is not None:
        return step.with_seconds(seconds(step))
    if bandwidth is not None:
        return step.with_seconds(step.working_set / bandwidth)
    if step.duration <= 0:
        raise PlanError("no time passes in the trace; say the bandwidth or the seconds of its operations")
    if trace.metadata.get("clock") == "none":
        raise PlanError(
            "the trace is of tensors without memory, so its times are nobody's: say the device's bandwidth "
            "(--bandwidth 1000GB)"
        )
    return step


def iteration_of(trace: Trace) -> tuple[int, int] | None:
    """Return the rows [first, end) of the second-last iteration, delimited by marks.

    Delimiting marks are named "step" or "begin" or have no name. Return None if the trace has fewer than two
    whole iterations, since one iteration does not prove a repetition.
    """
    marks = np.flatnonzero(trace.kind == EventType.MARK)
    names = ["step" if o < 0 else trace.names[o] for o in trace.operation[marks].tolist()]
    steps = [int(row) for row, name in zip(marks, names, strict=True) if name in ("step", "begin")]
    return (steps[-3], steps[-2]) if len(steps) > 2 else None


@dataclass(frozen=True, eq=False)
class _Operations:
    """The operations of a trace.

    Attributes:
        of_row: int64[events], the operation of each event; -1 before the first operation.
        first: int64[operations], the first row of each operation.
    """

    of_row: NDArray[np.int64]
    first: NDArray[np.int64]


def _operations(trace: Trace) -> _Operations:
    kind, name, time = trace.kind, trace.operation, trace.time_ns
    touches = (kind == EventType.READ) | (kind == EventType.WRITE)
    starts = np.flatnonzero(touches | ((kind == EventType.ALLOC) & (name >= 0)))
    begins = np.ones(len(starts), np.bool_)
    here, before = starts[1:], starts[:-1]
    new = name[here] != name[before]
    later = time[here] != time[before]
    if trace.metadata.get("time") == "operation":
        new |= later
    else:
        new |= later & ((name[here] < 0) | ((kind[here] == EventType.ALLOC) & touches[before]))
    begins[1:] = new
    first = starts[begins]
    return _Operations(np.searchsorted(first, np.arange(len(trace)), side="right") - 1, first)


def _cut(trace: Trace, ops: _Operations, rows: tuple[int, int], *, circular: bool) -> Step:
    """Return the step of the operations whose first rows lie within [first, end)."""
    low, high = (int(np.searchsorted(ops.first, row)) for row in rows)
    k = high - low
    if k < 1:
        raise PlanError("the step has no operations")
    first = ops.first[low:high]
    ends = (
        trace.time_ns[ops.first[high]]
        if high < len(ops.first)
        else trace.time_ns[min(rows[1], len(trace)) - 1]
    )
    times = np.append(trace.time_ns[first], ends)
    alloc = np.flatnonzero((trace.kind == EventType.ALLOC) & (trace.size > 0))
    freed = np.full(len(trace), _NEVER, np.int64)
    frees = np.flatnonzero(trace.kind == EventType.FREE)
    freed[trace.births[frees]] = ops.of_row[frees] + 1
    start, end = ops.of_row[alloc] - low, np.where(freed[alloc] == _NEVER, _NEVER, freed[alloc] - low)
    # Buffers from before the first operation live from the beginning.
    early = ops.of_row[alloc] < low
    stays = early & (end >= k) if circular else np.zeros(len(alloc), np.bool_)
    keep = stays | (~early & (start < k)) if circular else (end > 0) & (start < k)
    if not circular:
        start, end = np.maximum(start, 0), np.minimum(end, k)
    end = np.where(end == _NEVER, k, end)  # without a free: to the iteration's end
    start, end = np.where(stays, 0, start), np.where(stays, k, np.maximum(end, start + 1))
    alloc, start, end, stays = alloc[keep], start[keep], end[keep], stays[keep]
    owner, op, writes = _accesses(trace, ops, alloc, low, np.where(stays, k, end))
    align = trace.alignment
    return Step(
        seconds=np.maximum(np.diff(times), 0) * 1e-9,
        operation=trace.operation[first],
        start=start,
        end=end,
        size=-(-trace.size[alloc] // align) * align,
        persistent=stays,
        ids=trace.buffer[alloc],
        access_buffer=owner,
        access_op=op,
        access_writes=writes,
        names=trace.names,
        circular=circular,
    )


def _accesses(
    trace: Trace, ops: _Operations, alloc: NDArray[np.int64], low: int, end: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return (buffer, operation, write flag) of the accesses to the given allocations, without duplicates."""
    row_of = np.full(len(trace), -1, np.int64)
    row_of[alloc] = np.arange(len(alloc))
    touched = np.flatnonzero((trace.kind == EventType.READ) | (trace.kind == EventType.WRITE))
    owner, op = row_of[trace.births[touched]], ops.of_row[touched] - low
    keep = (owner >= 0) & (op >= 0)
    keep &= op < end[np.maximum(owner, 0)]
    owner, op, writes = owner[keep], op[keep], trace.kind[touched[keep]] == EventType.WRITE
    order = np.lexsort([op, owner])
    owner, op, writes = owner[order], op[order], writes[order]
    new = np.ones(len(owner), np.bool_)
    new[1:] = (np.diff(owner) != 0) | (np.diff(op) != 0)
    any_writes = np.logical_or.reduceat(writes, np.flatnonzero(new)) if len(new) else writes
    return owner[new], op[new], any_writes

"""Caveats of a recording (missing facts, failed requests) as sentences for reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mempool.units import binary, source_line
from traces.completeness import History, completeness, device_free
from traces.trace import EventType

if TYPE_CHECKING:
    from collections.abc import Iterator

    from traces import Trace

#: Remedies for a missing beginning, by recorder.
_RECORD_EARLIER = {
    "snapshot": "call torch.cuda.memory._record_memory_history(max_entries=...) before the model is made",
    "profiler": "the live bytes count as one buffer, a memory snapshot tells the buffers",
}
#: Most bytes that PyTorch reserves in excess of a request: a segment of 20 MiB for smaller buffers
#: (c10/cuda/CUDACachingAllocator.h, kLargeBuffer).
_LARGEST_SURPLUS = 20 << 20


@dataclass(frozen=True)
class Refusals:
    """The refused requests of the recorded program on one device.

    Attributes:
        count: number of the requests.
        event: row of the largest request among the device's events.
        size_bytes: bytes of the largest request.
        live_bytes: requested bytes alive at the largest request.
        free_bytes: free bytes of the device at the largest request; None where unknown.
        operation: operation of the largest request; None where unknown.
        frame: source line of the largest request, without folders; None where unknown.
    """

    count: int
    event: int
    size_bytes: int
    live_bytes: int
    free_bytes: int | None
    operation: str | None
    frame: str | None


def place_of(trace: Trace, event: int) -> tuple[str | None, str | None]:
    """Return the operation and the source line, without folders, of an event; None where unknown."""
    operation, frame = int(trace.operation[event]), int(trace.frame[event])
    return (
        trace.names[operation] if operation >= 0 else None,
        source_line(trace.names[frame]) if frame >= 0 else None,
    )


def refusals(trace: Trace) -> Refusals | None:
    """Summarize the refused requests of a trace of one device; None if no request was refused.

    Raises:
        TraceError: the trace contradicts itself.
    """
    rows = np.flatnonzero(trace.kind == EventType.REFUSED)
    if not len(rows):
        return None
    event = int(rows[trace.size[rows].argmax()])
    free = int(device_free(trace)[np.searchsorted(rows, event)])
    operation, frame = place_of(trace, event)
    return Refusals(
        count=len(rows),
        event=event,
        size_bytes=int(trace.size[event]),
        live_bytes=int(trace.load()[event]),
        free_bytes=free if free >= 0 else None,
        operation=operation,
        frame=frame,
    )


def caveats(trace: Trace, device: int) -> list[str]:
    """Return sentences about missing facts and refused requests in a trace of one device.

    Args:
        trace: the events of the device.
        device: index of the device in the recording.

    Raises:
        TraceError: the trace contradicts itself.
    """
    return [*history_caveats(trace, device), *_refusals(trace), *pool_caveats(trace)]


def history_caveats(trace: Trace, device: int) -> Iterator[str]:
    """Yield a sentence about the missing part of a device's history, if any is missing."""
    known = completeness(trace, device)
    if known.is_whole:
        return
    earlier = _RECORD_EARLIER.get(trace.metadata.get("recorder", ""), "begin to record earlier")
    if known.history is History.ABSENT:
        yield (
            "history not recorded: only the state at the end is known, and no peak, lifetime or saving "
            f"before it; {earlier}"
        )
        return
    if known.live_before_bytes == known.reserved_before_bytes == 0:
        yield (
            "memory from before the recording is not in the file: loads and savings are those of what it "
            "recorded; begin to record before the model is made"
        )
        return
    reserved = known.reserved_before_bytes
    held = f", {binary(reserved)} reserved" if reserved else ""
    yield (
        f"the first events are lost: {binary(known.live_before_bytes)} were live{held} before the first "
        f"recorded event; the load before it may have been larger than any recorded one; {earlier}"
    )


def _refusals(trace: Trace) -> Iterator[str]:
    failed = refusals(trace)
    if failed is None:
        return
    many = "1 request failed" if failed.count == 1 else f"{failed.count:,} requests failed, the largest"
    size = binary(failed.size_bytes) if failed.size_bytes else "an unknown size"
    place = " in ".join(part for part in (failed.frame, failed.operation) if part)
    free = f", {binary(failed.free_bytes)} free on the device" if failed.free_bytes is not None else ""
    if (failed.free_bytes or 0) > failed.size_bytes + _LARGEST_SURPLUS:
        free += " (enough: a limit of the process, as of set_per_process_memory_fraction, refused it)"
    yield (
        f"out of memory: {many} for {size}{f' at {place}' if place else ''}, "
        f"with {binary(failed.live_bytes)} live{free}"
    )


def pool_caveats(trace: Trace) -> Iterator[str]:
    """Yield a sentence about private pools, if the trace has any."""
    in_pool = (trace.pool > 0) & ((trace.kind == EventType.RESERVE) | (trace.kind == EventType.ALLOC))
    count = len(np.unique(trace.pool[in_pool]))
    if count:
        pools = "1 private pool" if count == 1 else f"{count:,} private pools"
        yield (
            f"{pools} of captured graphs or MemPool, whose memory serves no other request: simulated so for "
            "plans and for allocators that keep streams apart, such as PyTorch's, but not for the others"
        )

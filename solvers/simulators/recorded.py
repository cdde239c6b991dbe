"""Simulation result of the recorded allocator itself, if the trace has its addresses."""

from __future__ import annotations

import types
from bisect import bisect_right, insort
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from solvers.simulators.simulation import Segments, Simulation
from traces.trace import EventType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces.trace import Trace


def recorded(trace: Trace) -> Simulation | None:
    """Return the recorded addresses and segments as a simulation named "recorded"; None if unknown.

    They are unknown if an address is missing, or if a buffer is outside all recorded segments, as in a
    recording that lacks the beginning or end. If segments have no addresses, as in a profiler's trace, the
    simulation has the reserved bytes of each event, but no segments.

    Bytes in use are the requested bytes rounded to the trace's alignment, without further losses inside
    blocks, which the trace lacks. Segments from before the recording count as driver calls, too.

    Args:
        trace: events of one device.

    Raises:
        TraceError: the trace contradicts itself.
    """
    segment = np.flatnonzero((trace.kind == EventType.RESERVE) | (trace.kind == EventType.RELEASE))
    alloc = trace.kind == EventType.ALLOC
    placed = np.flatnonzero(alloc & (trace.size > 0))
    by_address = bool((trace.address[segment] >= 0).any())
    if not len(segment) or (by_address and (trace.address[placed] < 0).any()):
        return None
    sign = np.where(trace.kind == EventType.RESERVE, 1, np.where(trace.kind == EventType.RELEASE, -1, 0))
    rounded = -(-trace.size // trace.alignment) * trace.alignment
    change = np.where(alloc, rounded, 0)
    freed = trace.kind == EventType.FREE
    change[freed] = -rounded[trace.births[freed]]
    live, reserved, segments = np.cumsum(change), np.cumsum(sign * trace.size), recorded_segments(trace)
    if not by_address:  # threads may report out of order
        live = np.minimum(live, reserved)
    elif (live > reserved).any() or not _lies_within(segments, trace.address[placed], trace.size[placed]):
        return None
    return Simulation(
        address=np.where(alloc & (trace.size > 0), np.maximum(trace.address, 0), -1),
        live=live,
        reserved=reserved,
        segments=segments,
        driver_calls=len(segment),
        failed_at=None,
        allocator="recorded",
        parameters=types.MappingProxyType({}),
        trace=trace,
    )


def _lies_within(segments: Segments, address: NDArray[np.int64], size: NDArray[np.int64]) -> bool:
    """Return true if each buffer is within memory held at any time; adjacent ranges count as one range."""
    order = np.argsort(segments.address, kind="stable")
    low = segments.address[order]
    high = np.maximum.accumulate(low + segments.size[order])
    opens = np.append(True, low[1:] > high[:-1])[: len(low)]
    low, high = low[opens], np.append(high[:-1][opens[1:]], high[-1:])
    at = np.searchsorted(low, address, side="right") - 1
    return bool(((at >= 0) & (address + size <= high[at])).all())


class _Range(NamedTuple):
    """Reserved memory: the addresses [address, end), the event of the reservation, and the stream."""

    address: int
    end: int
    start: int
    stream: int


def recorded_segments(trace: Trace) -> Segments:
    """Return ranges of addresses with the events of their reservation and release.

    Ranges without a release are held to the trace's end. A partial release splits a range. A repeated
    reservation first releases the range. Releases of unreserved memory are ignored.

    Args:
        trace: events of one device; their addresses may be unknown.
    """
    held: list[_Range] = []  # sorted, without overlaps
    done: list[tuple[_Range, int]] = []
    taken = (trace.kind == EventType.RESERVE) | (trace.kind == EventType.RELEASE)
    known = taken & (trace.address >= 0) & (trace.size > 0)
    for row in np.flatnonzero(known).tolist():
        address, size = int(trace.address[row]), int(trace.size[row])
        new = _Range(address, address + size, row, int(trace.stream[row]))
        _release(held, done, new)
        if trace.kind[row] == EventType.RESERVE:
            insort(held, new)
    done += [(part, len(trace)) for part in held]
    done.sort(key=lambda entry: entry[0].start)
    table = np.array(
        [(part.address, part.end - part.address, part.stream, part.start, end) for part, end in done],
        np.int64,
    ).reshape(-1, 5)
    # Blocks may span several ranges only in expandable segments.
    grows = trace.metadata.get("expandable") == "1"
    region = np.zeros(len(table), np.int64) if grows else np.arange(len(table))
    return Segments(table[:, 0], table[:, 1], table[:, 2], region, table[:, 3], table[:, 4])


def _release(held: list[_Range], done: list[tuple[_Range, int]], released: _Range) -> None:
    """End the held parts of a range at the event of the release."""
    low, high = released.address, released.end
    first = max(bisect_right(held, (low,)) - 1, 0)
    while first < len(held) and held[first].end <= low:
        first += 1
    last = first
    while last < len(held) and held[last].address < high:
        last += 1
    kept = []
    for part in held[first:last]:
        begin, end = max(part.address, low), min(part.end, high)
        done.append((part._replace(address=begin, end=end), released.start))
        if part.address < low:
            kept.append(part._replace(end=low))
        if part.end > high:
            kept.append(part._replace(address=high))
    held[first:last] = kept

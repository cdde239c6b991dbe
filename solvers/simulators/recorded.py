"""What the recorded allocator itself did, where the trace tells it."""

from __future__ import annotations

import types
from bisect import bisect_right, insort
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from solvers.simulators.simulation import Segments, Simulation
from traces.trace import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces.trace import Trace


def recorded(trace: Trace) -> Simulation | None:
    """The recorded addresses and segments as a simulation called "recorded"; None where they are not known.

    They are not where an address is missing, or where a buffer lies outside of all that was ever held, as in
    a recording whose beginning or end is lost. Where no address of a segment is known, as in a profiler's
    trace, the reserved bytes are known at each event, but no segments: the simulation has none.

    Bytes in use are the requested ones rounded to the trace's alignment: what the allocator lost beyond that
    inside of blocks is not told. Segments that were there before count as calls to the driver too.

    Args:
        trace: events of one device.

    Raises:
        TraceError: the trace contradicts itself.
    """
    segment = np.flatnonzero((trace.kind == Kind.RESERVE) | (trace.kind == Kind.RELEASE))
    alloc = trace.kind == Kind.ALLOC
    placed = np.flatnonzero(alloc & (trace.size > 0))
    by_address = bool((trace.address[segment] >= 0).any())
    if not len(segment) or (by_address and (trace.address[placed] < 0).any()):
        return None
    sign = np.where(trace.kind == Kind.RESERVE, 1, np.where(trace.kind == Kind.RELEASE, -1, 0))
    rounded = -(-trace.size // trace.alignment) * trace.alignment
    change = np.where(alloc, rounded, 0)
    freed = trace.kind == Kind.FREE
    change[freed] = -rounded[trace.births[freed]]
    live, reserved, segments = np.cumsum(change), np.cumsum(sign * trace.size), recorded_segments(trace)
    if not by_address:  # threads may report in another order than they reserve
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
    """Whether each buffer is in what was held at any time; ranges that touch are one."""
    order = np.argsort(segments.address, kind="stable")
    low = segments.address[order]
    high = np.maximum.accumulate(low + segments.size[order])
    opens = np.append(True, low[1:] > high[:-1])[: len(low)]
    low, high = low[opens], np.append(high[:-1][opens[1:]], high[-1:])
    at = np.searchsorted(low, address, side="right") - 1
    return bool(((at >= 0) & (address + size <= high[at])).all())


class _Range(NamedTuple):
    """Memory that is held: from one address to another, since an event, for a stream."""

    address: int
    end: int
    start: int
    stream: int


def recorded_segments(trace: Trace) -> Segments:
    """Ranges of addresses from the events in which they were reserved to those in which they were released.

    What is never given back is held to the trace's end. What is given back in part is held on in its other
    parts, and what is reserved again was given back. What was never reserved is passed over.

    Args:
        trace: events of one device; their addresses may be unknown.
    """
    held: list[_Range] = []  # sorted, without overlaps
    done: list[tuple[_Range, int]] = []
    taken = (trace.kind == Kind.RESERVE) | (trace.kind == Kind.RELEASE)
    known = taken & (trace.address >= 0) & (trace.size > 0)
    for row in np.flatnonzero(known).tolist():
        address, size = int(trace.address[row]), int(trace.size[row])
        new = _Range(address, address + size, row, int(trace.stream[row]))
        _release(held, done, new)
        if trace.kind[row] == Kind.RESERVE:
            insort(held, new)
    done += [(one, len(trace)) for one in held]
    done.sort(key=lambda entry: entry[0].start)
    table = np.array(
        [(one.address, one.end - one.address, one.stream, one.start, end) for one, end in done], np.int64
    ).reshape(-1, 5)
    # Blocks reach across the pieces of an expandable segment only.
    grows = trace.metadata.get("expandable") == "1"
    region = np.zeros(len(table), np.int64) if grows else np.arange(len(table))
    return Segments(table[:, 0], table[:, 1], table[:, 2], region, table[:, 3], table[:, 4])


def _release(held: list[_Range], done: list[tuple[_Range, int]], released: _Range) -> None:
    """End what is held of a range at its event."""
    low, high = released.address, released.end
    first = max(bisect_right(held, (low,)) - 1, 0)
    while first < len(held) and held[first].end <= low:
        first += 1
    last = first
    while last < len(held) and held[last].address < high:
        last += 1
    rest = []
    for one in held[first:last]:
        done.append((one._replace(address=max(one.address, low), end=min(one.end, high)), released.start))
        rest += [one._replace(end=low)] * (one.address < low) + [one._replace(address=high)] * (
            one.end > high
        )
    held[first:last] = rest

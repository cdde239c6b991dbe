"""What the recorded allocator itself did, where the trace tells it."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from solvers.simulators.simulation import Segments, Simulation
from traces.trace import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces.trace import Trace


def recorded(trace: Trace) -> Simulation | None:
    """The recorded addresses and segments as a simulation called "recorded"; None where they are not known.

    Bytes in use are the requested ones rounded to the trace's alignment: what the allocator lost beyond that
    inside of blocks is not told. Segments that were there before count as calls to the driver too.

    Args:
        trace: events of one device.

    Raises:
        TraceError: the trace contradicts itself.
    """
    segment = np.flatnonzero(trace.kind >= Kind.RESERVE)
    alloc = trace.kind == Kind.ALLOC
    if not len(segment) or (trace.address[alloc & (trace.size > 0)] < 0).any():
        return None
    sign = np.where(trace.kind == Kind.RESERVE, 1, np.where(trace.kind == Kind.RELEASE, -1, 0))
    rounded = -(-trace.size // trace.alignment) * trace.alignment
    change = np.where(alloc, rounded, 0)
    freed = trace.kind == Kind.FREE
    change[freed] = -rounded[trace.births[freed]]
    return Simulation(
        address=np.where(alloc & (trace.size > 0), trace.address, -1),
        live=np.cumsum(change),
        reserved=np.cumsum(sign * trace.size),
        segments=_segments(trace, segment),
        driver_calls=len(segment),
        failed_at=None,
        allocator="recorded",
        parameters=types.MappingProxyType({}),
        trace=trace,
    )


class _Range(NamedTuple):
    """Memory that is held: bytes, stream, and the event in which it was reserved."""

    size: int
    stream: int
    start: int


def _segments(trace: Trace, rows: NDArray[np.int64]) -> Segments:
    """Ranges from when they are reserved to when they are released, which may be piece by piece."""
    held: dict[int, _Range] = {}  # by address
    done: list[tuple[int, _Range, int]] = []
    for row in rows.tolist():
        address, size = int(trace.address[row]), int(trace.size[row])
        if trace.kind[row] == Kind.RESERVE:
            held[address] = _Range(size, int(trace.stream[row]), row)
            continue
        for begin, one in _overlapped(held, address, size):
            del held[begin]
            low, high, end = max(begin, address), min(begin + one.size, address + size), begin + one.size
            done.append((low, one._replace(size=high - low), row))
            if begin < low:
                held[begin] = one._replace(size=low - begin)
            if high < end:
                held[high] = one._replace(size=end - high)
    done += [(address, one, len(trace)) for address, one in held.items()]
    done.sort(key=lambda entry: entry[1].start)
    table = np.array([(address, *one, gone) for address, one, gone in done], np.int64).reshape(-1, 5)
    # Blocks reach across the pieces of an expandable segment only.
    grows = trace.metadata.get("expandable") == "1"
    region = np.zeros(len(table), np.int64) if grows else np.arange(len(table))
    return Segments(table[:, 0], table[:, 1], table[:, 2], region, table[:, 3], table[:, 4])


def _overlapped(held: dict[int, _Range], address: int, size: int) -> list[tuple[int, _Range]]:
    if address in held and held[address].size == size:
        return [(address, held[address])]
    return [(at, one) for at, one in held.items() if at < address + size and address < at + one.size]

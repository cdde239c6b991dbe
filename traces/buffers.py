"""Tables of the buffers to pack: one row per buffer, with a lifetime on a line or on a circle."""

from __future__ import annotations

import dataclasses
import types
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.columns import LARGEST, column, first_fault, numbered, power_of_two
from traces.errors import TraceError
from traces.trace import EventType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from traces.trace import Trace


#: Per-buffer columns and their types.
COLUMNS: Mapping[str, np.dtype[Any]] = types.MappingProxyType(
    {
        "start": np.dtype(np.int64),
        "end": np.dtype(np.int64),
        "size": np.dtype(np.int64),
        "alignment": np.dtype(np.int64),
        "offset": np.dtype(np.int64),
        "group": np.dtype(np.int64),
        "stream": np.dtype(np.int64),
        "persistent": np.dtype(np.bool_),
    }
)
GAPS = ("gap_buffer", "gap_start", "gap_end")
_DEFAULTS: Mapping[str, ArrayLike] = {"alignment": 1, "offset": -1, "persistent": False}


@dataclass(frozen=True, eq=False)
class Buffers:
    """Buffers with their lifetimes in logical time, as read-only columns: n rows of buffers, k rows of gaps.

    With ``period`` None time is a line. With a period P time is a circle: ``0 <= start < P``, and ``end`` is
    larger than P if the lifetime reaches into later iterations. If a lifetime is longer than P, several
    instances of the buffer, one per iteration, are alive together. Zero sizes and zero-length lifetimes take
    no memory.

    Attributes:
        start: int64, time of the alloc.
        end: int64, time of the free, exclusive.
        size: int64, bytes.
        alignment: int64, a power of two that divides the offset.
        offset: int64, an offset that a plan must keep, or -1.
        group: int64; buffers of different groups never share addresses, whatever their lifetimes (the order
            of their streams or sequences is not known).
        stream: int64, the stream of the alloc.
        persistent: bool, alive across iterations, not planned.
        gap_buffer: int64, the row of the buffer that has this gap; gaps are sorted by (buffer, start).
        gap_start: int64, first time at which the buffer needs no memory, on the time axis of the buffer's
            lifetime.
        gap_end: int64, end of the gap, exclusive. Gaps of a buffer do not overlap and lie within the
            lifetime.
        ids: names of the buffers, or None.
        period: length of the circle in events, or None.

    Raises:
        TraceError: naming the first buffer that breaks one of these rules.
    """

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    size: NDArray[np.int64]
    alignment: NDArray[np.int64]
    offset: NDArray[np.int64]
    group: NDArray[np.int64]
    stream: NDArray[np.int64]
    persistent: NDArray[np.bool_]
    gap_buffer: NDArray[np.int64]
    gap_start: NDArray[np.int64]
    gap_end: NDArray[np.int64]
    ids: tuple[str, ...] | None = None
    period: int | None = None

    def __post_init__(self) -> None:
        length, gaps = len(np.atleast_1d(self.start)), len(np.atleast_1d(self.gap_buffer))
        for name, dtype in COLUMNS.items():
            object.__setattr__(self, name, column(getattr(self, name), dtype, name, length))
        for name in GAPS:
            object.__setattr__(self, name, column(getattr(self, name), np.int64, name, gaps))
        if self.ids is not None:
            object.__setattr__(self, "ids", tuple(self.ids))
        check_buffers(self)

    @classmethod
    def of(
        cls,
        start: ArrayLike,
        end: ArrayLike,
        size: ArrayLike,
        *,
        gaps: Sequence[tuple[int, int, int]] | NDArray[np.int64] = (),
        ids: Sequence[str] | None = None,
        period: int | None = None,
        **columns: ArrayLike,
    ) -> Buffers:
        """Build buffers from arrays, lists or scalars.

        Defaults of missing columns: alignment 1, no fixed offset, group 0, stream 0, not persistent.

        Args:
            start: int64[n], as the class.
            end: int64[n], as the class.
            size: int64[n], as the class.
            gaps: (buffer, start, end) in any order.
            ids: as the class.
            period: as the class.
            columns: any other column, as an array or a scalar for all.

        Raises:
            TraceError: as the class.
            TypeError: a column that does not exist.
        """
        if unknown := columns.keys() - COLUMNS.keys():
            raise TypeError(f"buffers have no column {', '.join(sorted(unknown))}")
        length = len(np.atleast_1d(np.asarray(start)))
        given: dict[str, ArrayLike] = {"start": start, "end": end, "size": size, **columns}
        table = {
            name: column(given.get(name, _DEFAULTS.get(name, 0)), dtype, name, length)
            for name, dtype in COLUMNS.items()
        }
        gap = np.asarray(gaps).reshape(-1, 3)
        gap = gap[np.lexsort((gap[:, 1], gap[:, 0]))]
        named = None if ids is None else tuple(ids)
        return cls(
            **table, gap_buffer=gap[:, 0], gap_start=gap[:, 1], gap_end=gap[:, 2], ids=named, period=period
        )

    def __len__(self) -> int:
        return len(self.start)

    def __reduce__(self) -> tuple[object, ...]:
        # Copying and unpickling call the constructor, so copies have read-only columns, too.
        return Buffers, tuple(getattr(self, name.name) for name in dataclasses.fields(self))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """``end - start``, int64[n]."""
        return self.end - self.start

    @property
    def wrap_around(self) -> NDArray[np.bool_]:
        """Mask of the buffers alive when the next iteration begins, bool[n]; none on a line."""
        if self.period is None:
            return np.zeros(len(self), np.bool_)
        return self.end > self.period

    @property
    def instances(self) -> NDArray[np.int64]:
        """Largest number of instances of each buffer alive together, at least 1, int64[n]; 1 on a line."""
        if self.period is None:
            return np.ones(len(self), np.int64)
        return np.maximum(-(-self.lengths // self.period), 1)

    @cached_property
    def max_instances(self) -> int:
        """The largest of `instances` among the planned buffers; 1 if there are none."""
        if self.period is None:
            return 1
        longest = int(self.lengths[~self.persistent].max(initial=0))
        return max(-(-longest // self.period), 1)

    def name(self, row: int) -> str:
        """Return the buffer's name in messages: the row, and the id if ids exist."""
        return str(row) if self.ids is None else f"{row} ({self.ids[row]})"

    def select(self, rows: ArrayLike) -> Buffers:
        """Return the buffers of a boolean mask, or of indices in the order given, with their gaps and ids.

        Raises:
            TraceError: a buffer with an id is chosen twice.
        """
        index = np.asarray(rows)
        index = np.flatnonzero(index) if index.dtype == np.bool_ else index.astype(np.int64)
        first = np.searchsorted(self.gap_buffer, index)
        count = np.searchsorted(self.gap_buffer, index, side="right") - first
        owner = np.repeat(np.arange(len(index)), count)
        gap = np.arange(len(owner)) + np.repeat(first - (np.cumsum(count) - count), count)
        return Buffers(
            **{name: getattr(self, name)[index] for name in COLUMNS},
            gap_buffer=owner,
            gap_start=self.gap_start[gap],
            gap_end=self.gap_end[gap],
            ids=None if self.ids is None else tuple(self.ids[row] for row in index),
            period=self.period,
        )

    def unrolled(self, k: int) -> Buffers:
        """Return ``k`` iterations as one: n*k buffers on a circle of ``k`` times the period.

        Row ``j * n + i`` is instance j of buffer i, one period later than instance j-1, named ``ID@j``.

        Raises:
            ValueError: ``k`` is less than 1, or not 1 on a line.
        """
        if k < 1 or (self.period is None and k != 1):
            raise ValueError("only buffers with a period unroll, and only to one iteration or more")
        if self.period is None or k == 1:
            return self
        n = len(self)
        later = np.repeat(np.arange(k, dtype=np.int64), n) * self.period
        gap_turn = np.repeat(np.arange(k, dtype=np.int64), len(self.gap_buffer))
        table = {name: np.tile(getattr(self, name), k) for name in COLUMNS}
        table["start"], table["end"] = table["start"] + later, table["end"] + later
        return Buffers(
            **table,
            gap_buffer=np.tile(self.gap_buffer, k) + gap_turn * n,
            gap_start=np.tile(self.gap_start, k) + gap_turn * self.period,
            gap_end=np.tile(self.gap_end, k) + gap_turn * self.period,
            ids=None if self.ids is None else tuple(f"{name}@{j}" for j in range(k) for name in self.ids),
            period=self.period * k,
        )


def buffers_of(trace: Trace, *, alignment: int = 1) -> Buffers:
    """Return the buffers of a whole trace on one line, in order of allocation; time is the event's row.

    A buffer that is never freed ends with the trace. Each (device, stream) is a separate group: the order of
    frees and allocs of two streams is known only on the host, not on the device.

    Args:
        trace: a trace, which is validated.
        alignment: bytes, a power of two; the trace's own alignment if that is larger.

    Raises:
        TraceError: the trace contradicts itself.
    """
    trace.validate()
    row = np.flatnonzero(trace.kind == EventType.ALLOC)
    freed = np.flatnonzero(trace.kind == EventType.FREE)
    end = np.full(len(trace), len(trace), np.int64)
    end[trace.births[freed]] = freed
    device, stream = (numbered(of)[1] for of in (trace.device[row], trace.stream[row]))
    group = numbered(device * (stream.max(initial=0) + 1) + stream)[1]
    return Buffers.of(
        row,
        end[row],
        trace.size[row],
        alignment=max(alignment, trace.alignment),
        group=group,
        stream=trace.stream[row],
    )


def check_buffers(buffers: Buffers) -> None:
    """Raise an error for the first buffer that no packing problem permits.

    Raises:
        TraceError: naming the row.
    """
    if buffers.period is not None and not 1 <= buffers.period <= LARGEST:
        raise TraceError(f"period {buffers.period} is not between 1 and 2**62")
    if fault := first_fault(_faults(buffers)):
        raise TraceError(fault[1], row=fault[0])
    if len(buffers.gap_buffer):
        _check_gaps(buffers)
    if buffers.ids is None:
        return
    if len(buffers.ids) != len(buffers):
        raise TraceError(f"{len(buffers.ids)} ids for {len(buffers)} buffers")
    if len(set(buffers.ids)) != len(buffers):
        first: dict[str, int] = {}
        row = next(row for row, name in enumerate(buffers.ids) if first.setdefault(name, row) != row)
        raise TraceError(f"duplicate id {buffers.ids[row][:40]!r}", row=row)


def _faults(buffers: Buffers) -> list[tuple[NDArray[np.bool_], str]]:
    faults = [
        (buffers.end < buffers.start, "end before start"),
        ((buffers.start <= -LARGEST) | (buffers.end > LARGEST), "a time beyond 2**62"),
        (buffers.size < 0, "negative size"),
        (buffers.size > LARGEST, "size beyond 2**62"),
        (~power_of_two(buffers.alignment), "alignment is not a power of two"),
        (buffers.offset < -1, "negative offset"),
        (buffers.offset > LARGEST, "offset beyond 2**62"),
    ]
    if buffers.period is not None:
        outside = (buffers.start < 0) | (buffers.start >= buffers.period)
        faults.append((outside, f"start is outside the period of {buffers.period}"))
    return faults


def _check_gaps(buffers: Buffers) -> None:
    owner, start, end = buffers.gap_buffer, buffers.gap_start, buffers.gap_end
    unknown = (owner < 0) | (owner >= len(buffers))
    if unknown.any():
        raise TraceError(f"a gap of buffer {owner[unknown][0]}, of {len(buffers)} buffers")
    follows = np.zeros(len(owner), np.bool_)
    follows[1:] = (owner[1:] < owner[:-1]) | ((owner[1:] == owner[:-1]) & (start[1:] < end[:-1]))
    faults = [
        (start >= end, "a gap that ends before it starts"),
        ((start < buffers.start[owner]) | (end > buffers.end[owner]), "a gap outside the lifetime"),
        (follows, "gaps overlap or are not sorted"),
    ]
    if fault := first_fault(faults):
        raise TraceError(fault[1], row=int(owner[fault[0]]))

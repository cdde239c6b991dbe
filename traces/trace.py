"""Traces: allocations, frees, accesses and marks of a program, one row per event."""

from __future__ import annotations

import dataclasses
import enum
import types
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.columns import LARGEST, MOST_THREADS, column, distinct, first_fault
from traces.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray


class EventType(enum.IntEnum):
    """The type of an event."""

    ALLOC = 0
    FREE = 1
    READ = 2
    WRITE = 3
    MARK = 4
    RESERVE = 5  #: the recorded allocator took a segment from the device
    RELEASE = 6  #: the recorded allocator returned a segment to the device
    REFUSED = 7  #: a failed request: the recorded program ran out of memory


#: Name of the marks that recorders set at each optimizer step. These marks end iterations only if the trace
#: has no other marks and no repeated sequence.
AUTOMATIC_MARK = "optimizer step"

#: Categories of the marks that open and close a named range of the program, such as ``record_function``
#: writes. Ranges of one device nest; their marks do not divide iterations.
RANGE_BEGIN, RANGE_END = "range begins", "range ends"

#: Per-event columns of a trace and their types, in the order of storage.
COLUMNS: Mapping[str, np.dtype[Any]] = types.MappingProxyType(
    {
        "kind": np.dtype(np.uint8),
        "buffer": np.dtype(np.int64),
        "size": np.dtype(np.int64),
        "stream": np.dtype(np.int64),
        "device": np.dtype(np.int32),
        "thread": np.dtype(np.int32),
        "time_ns": np.dtype(np.int64),
        "operation": np.dtype(np.int32),
        "frame": np.dtype(np.int32),
        "address": np.dtype(np.int64),
        "module": np.dtype(np.int32),
        "category": np.dtype(np.int32),
        "stack": np.dtype(np.int32),
        "pool": np.dtype(np.int32),
    }
)
#: Columns that hold indices into the trace's names, -1 where unknown.
NAMED = ("operation", "frame", "module", "category", "stack")
#: The value of each column for "unknown".
UNKNOWN: Mapping[str, int] = types.MappingProxyType(
    dict.fromkeys(COLUMNS, 0) | dict.fromkeys((*NAMED, "address"), -1)
)


@dataclass(frozen=True, eq=False)
class Trace:
    """Events in host order, as read-only columns of equal length.

    Attributes:
        kind: uint8, a `EventType`.
        buffer: int64, id of the buffer, unique to one alloc; -1 for marks and segments.
        size: int64, bytes requested by an alloc or a refused request, or bytes of a segment that is reserved
            or released; 0 elsewhere.
        stream: int64, the stream of the event.
        device: int32, the device's index.
        thread: int32, dense index of the thread, in order of first appearance in the recording.
        time_ns: int64, host clock in ns; need not increase.
        operation: int32, index into ``names`` of the operation, -1 where unknown.
        frame: int32, index into ``names`` of the source line, -1 where unknown.
        address: int64, the address that the recorded allocator gave to an alloc, or the address of a segment;
            -1 elsewhere and where unknown.
        module: int32, index into ``names`` of the path of the framework module in which the event happened,
            -1 where unknown.
        category: int32, on an alloc the index into ``names`` of the buffer's role in the program, such as
            "parameters" or "activations"; on a mark `RANGE_BEGIN` or `RANGE_END`; -1 elsewhere and where
            unknown.
        stack: int32, index into ``names`` of the Python frames of the event, ``FILE:LINE FUNCTION`` each,
            innermost first, separated by line feeds; -1 where unknown.
        pool: int32, the private pool of an alloc or a segment (PyTorch gives one to each captured graph and
            to each ``MemPool``); 0 for the common pool and elsewhere.
        names: the strings.
        metadata: everything else, as strings; ``alignment`` is the address rounding of the recorded
            allocator.

    Raises:
        TraceError: columns of another shape, length or type. Contradictory *events* are found by `validate`.
    """

    kind: NDArray[np.uint8]
    buffer: NDArray[np.int64]
    size: NDArray[np.int64]
    stream: NDArray[np.int64]
    device: NDArray[np.int32]
    thread: NDArray[np.int32]
    time_ns: NDArray[np.int64]
    operation: NDArray[np.int32]
    frame: NDArray[np.int32]
    address: NDArray[np.int64]
    module: NDArray[np.int32]
    category: NDArray[np.int32]
    stack: NDArray[np.int32]
    pool: NDArray[np.int32]
    names: tuple[str, ...] = ()
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length = len(np.atleast_1d(self.kind))
        for name, dtype in COLUMNS.items():
            object.__setattr__(self, name, column(getattr(self, name), dtype, name, length))
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "metadata", types.MappingProxyType(dict(self.metadata)))

    @classmethod
    def of(
        cls,
        kind: ArrayLike,
        buffer: ArrayLike,
        size: ArrayLike = 0,
        *,
        names: Sequence[str] = (),
        metadata: Mapping[str, str] | None = None,
        **columns: ArrayLike,
    ) -> Trace:
        """Build a trace from arrays, lists or scalars; a missing column is 0, or -1 (unknown) for names.

        Raises:
            TraceError: as the class.
            TypeError: a column that does not exist.
        """
        if unknown := columns.keys() - COLUMNS.keys():
            raise TypeError(f"a trace has no column {', '.join(sorted(unknown))}")
        length = len(np.atleast_1d(np.asarray(kind)))
        given: dict[str, ArrayLike] = {**UNKNOWN, "kind": kind, "buffer": buffer, "size": size, **columns}
        table = {name: column(given[name], dtype, name, length) for name, dtype in COLUMNS.items()}
        return cls(**table, names=tuple(names), metadata=metadata or {})

    def __len__(self) -> int:
        return len(self.kind)

    def __reduce__(self) -> tuple[object, ...]:
        # Copying and unpickling call the constructor, so that the columns of copies are read-only too.
        return Trace, (*(getattr(self, name) for name in COLUMNS), self.names, dict(self.metadata))

    def __getitem__(self, window: slice) -> Trace:
        """Return the events of a window, without frees and accesses of buffers allocated before the window.

        Raises:
            TraceError: the trace contradicts itself.
            TypeError: anything but a slice of step 1.
        """
        if not isinstance(window, slice) or window.step not in (None, 1):
            raise TypeError("a trace is cut by a slice of step 1")
        start, stop, _ = window.indices(len(self))
        keep = (self.births[start:stop] >= start) | ~self.of_buffers[start:stop]
        cut = {name: getattr(self, name)[start:stop][keep] for name in COLUMNS}
        return dataclasses.replace(self, **cut)

    @property
    def alignment(self) -> int:
        """Alignment of the recorded allocator in bytes, 1 if the recorder stored none.

        Raises:
            TraceError: the metadata's ``alignment`` is not a power of two.
        """
        text = self.metadata.get("alignment", "1")
        if text.isascii() and text.isdigit() and len(text) < 20:
            value = int(text)
            if 1 <= value <= LARGEST and value & (value - 1) == 0:
                return value
        raise TraceError(f"alignment {text[:40]!r} is not a power of two")

    @property
    def of_buffers(self) -> NDArray[np.bool_]:
        """Mask of the events of buffers (allocs, frees and accesses), bool[n]."""
        result: NDArray[np.bool_] = self.kind <= EventType.WRITE
        return result

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that have events other than marks, in ascending order."""
        return tuple(distinct(self.device[self.kind != EventType.MARK]).tolist())

    def on_device(self, device: int) -> Trace:
        """Return one device's events and all marks except other devices' ranges, all with that device."""
        rows = self.rows_on_device(device)
        cut = {name: getattr(self, name)[rows] for name in COLUMNS}
        return dataclasses.replace(self, **cut | {"device": np.full_like(cut["device"], device)})

    def rows_on_device(self, device: int) -> NDArray[np.int64]:
        """Return the rows that `on_device` keeps, int64[m]."""
        common = (self.kind == EventType.MARK) & (self.category < 0)
        return np.flatnonzero((self.device == device) | common)

    def validate(self) -> None:
        """Check that the sequence of events is possible.

        Raises:
            TraceError: naming the first row that contradicts an earlier row or is impossible in itself: an
                unknown kind, a negative size or a size beyond 2**62, a free or an access of a buffer that is
                not alive, an id used twice, a name that does not exist, more bytes alive than int64 holds.
        """
        _ = self.alignment, self.births
        self.load()

    def check_rows(self) -> None:
        """Check each row in isolation, the only check possible for a piece of a trace.

        Raises:
            TraceError: naming the first row that is impossible in itself.
        """
        if fault := first_fault(self.faults()):
            raise TraceError(fault[1], row=fault[0])

    def load(self) -> NDArray[np.int64]:
        """Return the bytes alive after each event, int64[n].

        Raises:
            TraceError: the trace contradicts itself.
        """
        change = np.where(self.kind == EventType.ALLOC, self.size, 0)
        freed = self.kind == EventType.FREE
        change[freed] = -self.size[self.births[freed]]
        # Sums of sizes up to 2**62 may overflow int64, so high and low halves are summed separately.
        high, low = np.cumsum(change >> 31), np.cumsum(change & (2**31 - 1))
        beyond = high + (low >> 31) >= 2**32
        if beyond.any():
            raise TraceError("more than 2**63 bytes are alive", row=int(beyond.argmax()))
        result: NDArray[np.int64] = (high << 31) + low
        return result

    @cached_property
    def births(self) -> NDArray[np.int64]:
        """Row of the alloc of each event's buffer, int64[n]; -1 for marks and segments.

        Raises:
            TraceError: the trace contradicts itself.
        """
        self.check_rows()
        rows = np.flatnonzero(self.of_buffers)
        order = rows[np.argsort(self.buffer[rows], kind="stable")]  # sorted by buffer, then by time
        opens = np.ones(len(order), np.bool_)
        opens[1:] = self.buffer[order[1:]] != self.buffer[order[:-1]]
        self._check_order(order, opens)
        births = np.full(len(self), -1, np.int64)
        births[order] = order[opens][np.cumsum(opens) - 1]
        births.flags.writeable = False
        return births

    def _check_order(self, order: NDArray[np.int64], opens: NDArray[np.bool_]) -> None:
        """Raise for the first event whose buffer is not alive or is allocated a second time."""
        kind = self.kind[order]
        # A buffer's earliest wrong event is its first event or follows its free, so a comparison with the
        # previous event suffices.
        after_free = np.zeros(len(order), np.bool_)
        after_free[1:] = ~opens[1:] & (kind[:-1] == EventType.FREE)
        again = ~opens & (kind == EventType.ALLOC)
        wrong = np.flatnonzero((opens & (kind != EventType.ALLOC)) | again | after_free)
        if not len(wrong):
            return
        at = wrong[order[wrong].argmin()]
        row = int(order[at])
        what, buffer = EventType(int(kind[at])).name.lower(), int(self.buffer[row])
        if again[at]:
            raise TraceError(f"buffer {buffer} is allocated a second time", row=row)
        why = "after its free" if after_free[at] else "before its alloc"
        raise TraceError(f"{what} of buffer {buffer} {why}", row=row)

    def faults(self) -> list[tuple[NDArray[np.bool_], str]]:
        """Return masks of the rows that are impossible in themselves, bool[n] each, by reason."""
        of_buffer = self.of_buffers
        segment = (self.kind == EventType.RESERVE) | (self.kind == EventType.RELEASE)
        placed, refused = (self.kind == EventType.ALLOC) | segment, self.kind == EventType.REFUSED
        named = (self.kind == EventType.ALLOC) | (self.kind == EventType.MARK)
        names = len(self.names)
        return [
            (self.kind > max(EventType), "unknown kind of event"),
            (self.size < 0, "negative size"),
            (self.size > LARGEST, "size beyond 2**62"),
            (~placed & ~refused & (self.size != 0), "only an alloc has a size"),
            (self.address < -1, "negative address"),
            (~placed & (self.address != -1), "only an alloc has an address"),
            (refused & (self.buffer != -1), "a refused request with a buffer"),
            (~of_buffer & ~segment & (self.buffer != -1), "a mark with a buffer"),
            (segment & (self.buffer != -1), "a segment with a buffer"),
            (of_buffer & (self.buffer < 0), "negative buffer id"),
            (self.thread < 0, "negative thread index"),
            (self.thread >= MOST_THREADS, f"thread index beyond {MOST_THREADS}"),
            (~named & (self.category != -1), "only an alloc or a mark has a category"),
            (self.pool < 0, "negative pool"),
            *((_beyond(getattr(self, name), names), f"{name} is not among the names") for name in NAMED),
        ]


def _beyond(index: NDArray[np.int32], names: int) -> NDArray[np.bool_]:
    result: NDArray[np.bool_] = (index < -1) | (index >= names)
    return result

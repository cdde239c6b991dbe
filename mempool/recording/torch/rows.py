"""Rows of a recording, three integers each, and their conversion to columns."""

from __future__ import annotations

import warnings
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from traces.trace import EventType

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

# Row kinds in addition to event types. POINTER: the third number is the buffer's address or, with a phase,
# the time of this observation. SPAN: end and beginning of an operation. SIZE: size of the buffer, with the
# device in the thread's field.
POINTER, SPAN, SIZE = 5, 6, 7
#: Event types as plain numbers, since an enumeration lookup takes longer than adding a row.
ALLOC, FREE, READ, WRITE, MARK = (
    int(kind) for kind in (EventType.ALLOC, EventType.FREE, EventType.READ, EventType.WRITE, EventType.MARK)
)

#: Default limit on rows: 0.8 GB.
LIMIT = 1 << 25

# A head holds kind, phase, thread + 1, name + 1, module + 1, from the lowest bit up.
PHASE, THREAD, NAME, MODULE = 3, 6, 16, 38
_WIDTHS = {
    "kind": (0, 3),
    "phase": (PHASE, 3),
    "thread": (THREAD, 10),
    "name": (NAME, 22),
    "module": (MODULE, 24),
}


class Rows:
    """Append-only table that an interrupt never leaves with a partial row.

    `array.extend` runs no Python code, so finalisers and other threads run only before or after the call.

    Attributes:
        limit: most rows that are kept.
        full: true if the table accepts no more rows.
        truncated: true if full because of the limit.
    """

    def __init__(self, limit: int) -> None:
        self._numbers = array("q")
        self.limit, self.full, self.truncated = limit, False, False
        self.extend: Callable[[Iterable[int]], None] = self._numbers.extend

    def __len__(self) -> int:
        return len(self._numbers) // 3

    def forget(self) -> None:
        """Reject further rows."""
        self.full, self.extend = True, _forget

    def end(self) -> None:
        """Reject further rows, and warn that the limit was reached."""
        if not self.full:
            self.forget()
            self.truncated = True
            warnings.warn(f"recording has ended after {self.limit:,} events", RuntimeWarning, stacklevel=2)

    def table(self) -> Table:
        """Return the rows so far as columns."""
        numbers = np.array(self._numbers, np.int64).reshape(-1, 3)
        head = numbers[:, 0]
        parts = {name: (head >> low) & ((1 << width) - 1) for name, (low, width) in _WIDTHS.items()}
        buffers = int(numbers[parts["kind"] == EventType.ALLOC, 1].max(initial=-1)) + 1
        size, device, pointer, seen = np.zeros((4, buffers), np.int64)
        sizes, pointers = parts["kind"] == SIZE, parts["kind"] == POINTER
        size[numbers[sizes, 1]] = numbers[sizes, 2]
        device[numbers[sizes, 1]] = parts["thread"][sizes]
        for values, mine in ((pointer, parts["phase"] == 0), (seen, parts["phase"] > 0)):
            rows = numbers[pointers & mine]
            values[rows[:, 1]] = rows[:, 2]
        keep, spans = parts["kind"] <= EventType.MARK, parts["kind"] == SPAN
        return Table(
            parts["kind"][keep],
            numbers[keep, 1],
            numbers[keep, 2],
            parts["phase"][keep],
            np.maximum(parts["thread"][keep] - 1, 0),
            parts["name"][keep] - 1,
            parts["module"][keep] - 1,
            size,
            device,
            pointer,
            seen,
            Spans(numbers[spans, 2], numbers[spans, 1], parts["name"][spans] - 1, parts["module"][spans] - 1),
        )


def _forget(_: Iterable[int]) -> None:
    pass


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of n events and m buffers; the last three columns are empty or 0 unless requested.

    Attributes:
        kind, buffer, time_ns, phase, thread, name, module: int64[n]; name and module -1 where unknown.
        size: int64[m], bytes.
        device: int64[m], number of the device in order of first appearance.
        pointer: int64[m], address.
        seen: int64[m], a time at which the buffer was at this address, in ns.
        spans: time span of each operation.
    """

    kind: NDArray[np.int64]
    buffer: NDArray[np.int64]
    time_ns: NDArray[np.int64]
    phase: NDArray[np.int64]
    thread: NDArray[np.int64]
    name: NDArray[np.int64]
    module: NDArray[np.int64]
    size: NDArray[np.int64]
    device: NDArray[np.int64]
    pointer: NDArray[np.int64]
    seen: NDArray[np.int64]
    spans: Spans


@dataclass(frozen=True, eq=False)
class Spans:
    """Time spans of operations, in the order of their ends: int64[k] each; module is -1 where unknown."""

    begin_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    name: NDArray[np.int64]
    module: NDArray[np.int64]

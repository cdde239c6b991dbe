"""Events as they come, three integers each, and what they are as a trace."""

from __future__ import annotations

import warnings
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from traces.trace import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

# Kinds of rows that are no events. POINTER: the third number is where the buffer lies; with a phase, when
# that was seen. SPAN: an operation's end and beginning. SIZE: the buffer's size; the thread is its device.
POINTER, SPAN, SIZE = 5, 6, 7
#: Kinds of events, as plain numbers: a row takes less than a look at an enumeration.
ALLOC, FREE, READ, WRITE, MARK = (
    int(kind) for kind in (Kind.ALLOC, Kind.FREE, Kind.READ, Kind.WRITE, Kind.MARK)
)

#: So many are kept by default: 0.8 GB.
LIMIT = 1 << 25

# A head is kind, phase, thread + 1, name + 1, module + 1; from the lowest bit up.
PHASE, THREAD, NAME, MODULE = 3, 6, 16, 38
_WIDTHS = {
    "kind": (0, 3),
    "phase": (PHASE, 3),
    "thread": (THREAD, 10),
    "name": (NAME, 22),
    "module": (MODULE, 24),
}


class Rows:
    """A table that only grows, at its end and by whole rows, whoever interrupts whom.

    `array.extend` runs no Python code, so that a finaliser or another thread comes before it or after it.

    Attributes:
        limit: how many are kept.
        full: whether nothing is added any more.
        truncated: whether that is because there were so many.
    """

    def __init__(self, limit: int) -> None:
        self._numbers = array("q")
        self.limit, self.full, self.truncated = limit, False, False
        self.extend: Callable[[Iterable[int]], None] = self._numbers.extend

    def __len__(self) -> int:
        return len(self._numbers) // 3

    def forget(self) -> None:
        """Add nothing more."""
        self.full, self.extend = True, _forget

    def end(self) -> None:
        """Add nothing more, and say so."""
        if not self.full:
            self.forget()
            self.truncated = True
            warnings.warn(f"recording has ended after {self.limit:,} events", RuntimeWarning, stacklevel=2)

    def table(self) -> Table:
        """What is in it so far."""
        numbers = np.array(self._numbers, np.int64).reshape(-1, 3)
        head = numbers[:, 0]
        parts = {name: (head >> low) & ((1 << width) - 1) for name, (low, width) in _WIDTHS.items()}
        buffers = int(numbers[parts["kind"] == Kind.ALLOC, 1].max(initial=-1)) + 1
        size, device, pointer, seen = np.zeros((4, buffers), np.int64)
        sizes, pointers = parts["kind"] == SIZE, parts["kind"] == POINTER
        size[numbers[sizes, 1]] = numbers[sizes, 2]
        device[numbers[sizes, 1]] = parts["thread"][sizes]
        for values, mine in ((pointer, parts["phase"] == 0), (seen, parts["phase"] > 0)):
            rows = numbers[pointers & mine]
            values[rows[:, 1]] = rows[:, 2]
        keep, spans = parts["kind"] <= Kind.MARK, parts["kind"] == SPAN
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
    """Columns of n events, and of m buffers; the last three empty or 0 unless they were asked for.

    Attributes:
        kind, buffer, time_ns, phase, thread, name, module: int64[n]; name and module -1 where unknown.
        size: int64[m], bytes.
        device: int64[m], number of the device in the order in which they were met.
        pointer: int64[m], where it lies.
        seen: int64[m], a time at which it lay there, in ns.
        spans: when each operation ran.
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
    """When operations ran, in the order of their ends: int64[k] each; module is -1 where unknown."""

    begin_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    name: NDArray[np.int64]
    module: NDArray[np.int64]

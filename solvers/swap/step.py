"""A step in time: the duration of each operation, and the buffers that it accesses."""

from __future__ import annotations

import types
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from solvers.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_COLUMNS: Mapping[str, Any] = types.MappingProxyType(
    {
        "seconds": np.float64,
        "operation": np.int32,
        "start": np.int64,
        "end": np.int64,
        "size": np.int64,
        "persistent": np.bool_,
        "ids": np.int64,
        "access_buffer": np.int64,
        "access_op": np.int64,
        "access_writes": np.bool_,
    }
)
#: Most turns that a lifetime may span in a step of one iteration.
_MOST_TURNS = 64


@dataclass(frozen=True, eq=False)
class Step:
    """Sequence of K operations with n buffers and m accesses; read-only columns.

    Time is the index of an operation. A buffer takes memory from the start of the operation that allocates it
    to the end of the operation that frees it. A ``circular`` step repeats: operation K is operation 0 of the
    next turn, and the lifetime of a buffer may reach into later turns.

    Attributes:
        seconds: float64[K], duration of each operation, without waiting.
        operation: int32[K], index into ``names``, -1 where unknown.
        start: int64[n], the first operation in which the buffer takes memory, 0 <= start < K.
        end: int64[n], the operation before which the buffer is freed; beyond K, in a later turn.
        size: int64[n], bytes.
        persistent: bool[n], alive always, start 0 and end K; only on a circle.
        ids: int64[n], identifiers of the buffers in the trace.
        access_buffer: int64[m], row of the buffer; accesses are sorted by (buffer, operation), each once.
        access_op: int64[m], the operation, start <= access_op < end.
        access_writes: bool[m], true if the access writes.
        names: the operations' names.
        circular: true if the step repeats.

    Raises:
        PlanError: columns that break one of these rules.
    """

    seconds: NDArray[np.float64]
    operation: NDArray[np.int32]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    size: NDArray[np.int64]
    persistent: NDArray[np.bool_]
    ids: NDArray[np.int64]
    access_buffer: NDArray[np.int64]
    access_op: NDArray[np.int64]
    access_writes: NDArray[np.bool_]
    names: tuple[str, ...] = ()
    circular: bool = False

    def __post_init__(self) -> None:
        for name, dtype in _COLUMNS.items():
            column = np.ascontiguousarray(getattr(self, name), dtype).view()
            column.flags.writeable = False
            object.__setattr__(self, name, column)
        for wrong, what in self._faults():
            if wrong:
                raise PlanError(f"a step {what}")

    def _faults(self) -> list[tuple[bool, str]]:
        n, k, m = len(self.size), len(self.seconds), len(self.access_op)
        same = all(len(getattr(self, name)) == n for name in ("start", "end", "persistent", "ids"))
        same &= len(self.operation) == k and len(self.access_buffer) == m == len(self.access_writes)
        if not same:
            return [(True, "with columns of different lengths")]
        if n and not k:
            return [(True, "with buffers and no operation")]
        if ((self.access_buffer < 0) | (self.access_buffer >= n)).any():
            return [(True, "with an access of no buffer")]
        owner, most = self.access_buffer, k * (_MOST_TURNS if self.circular else 1)
        outside = (self.access_op < self.start[owner]) | (self.access_op >= self.end[owner])
        order = (owner[1:] > owner[:-1]) | ((owner[1:] == owner[:-1]) & (np.diff(self.access_op) > 0))
        whole = (self.start == 0) & (self.end == k)
        return [
            (not (np.isfinite(self.seconds) & (self.seconds >= 0)).all(), "with times that are none"),
            (bool((self.size < 0).any()), "with a negative size"),
            (
                bool(((self.start < 0) | (self.start >= max(k, 1))).any()),
                "with a buffer that starts outside of it",
            ),
            (
                bool(((self.end <= self.start) | (self.end > most)).any()),
                "with a buffer that ends outside of it",
            ),
            (bool(outside.any()), "with an access outside of a lifetime"),
            (not order.all(), "with accesses out of order"),
            (bool((self.persistent & ~whole).any()), "with a persistent buffer that is not always there"),
            (bool(self.persistent.any()) and not self.circular, "on a line with persistent buffers"),
        ]

    def __len__(self) -> int:
        return len(self.seconds)

    @cached_property
    def begins(self) -> NDArray[np.float64]:
        """Start time of each operation without waiting, and end of the last one, float64[K+1] in seconds."""
        return np.concatenate([[0.0], np.cumsum(self.seconds)])

    @property
    def duration(self) -> float:
        """Seconds of the step without waiting."""
        return float(self.begins[-1])

    @cached_property
    def load(self) -> NDArray[np.int64]:
        """Bytes alive during each operation, int64[K]; on a circle of all instances."""
        return self.spread(self.start, self.end, self.size)

    def spread(
        self, start: NDArray[np.int64], end: NDArray[np.int64], size: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the sum of ``size`` over the intervals [start, end) around each operation, int64[K]."""
        k = len(self)
        turns = max(int(-(-end.max(initial=0) // max(k, 1))), 1)
        change = np.zeros(turns * k + 1, np.int64)
        np.add.at(change, start, size)
        np.add.at(change, end, -size)
        result: NDArray[np.int64] = np.cumsum(change[:-1]).reshape(turns, k).sum(axis=0)
        return result

    @property
    def peak_bytes(self) -> int:
        """The largest load in bytes."""
        return int(self.load.max(initial=0))

    @cached_property
    def working_set(self) -> NDArray[np.int64]:
        """Bytes of the buffers that each operation accesses, int64[K]."""
        result = np.zeros(len(self), np.int64)
        np.add.at(result, self.access_op % max(len(self), 1), self.size[self.access_buffer])
        return result

    @cached_property
    def untouched(self) -> NDArray[np.int64]:
        """Rows of the persistent buffers of more than 0 bytes that no operation accesses."""
        touched = np.zeros(len(self.size), np.bool_)
        touched[self.access_buffer] = True
        return np.flatnonzero(self.persistent & ~touched & (self.size > 0))

    def without(self, rows: NDArray[np.int64]) -> Step:
        """Return a copy in which these buffers have 0 bytes."""
        size = self.size.copy()
        size[rows] = 0
        columns = {name: getattr(self, name) for name in _COLUMNS} | {"size": size}
        return Step(**columns, names=self.names, circular=self.circular)

    def name(self, op: int) -> str:
        """Return the label of an operation in messages: the index, and the name if known."""
        index = int(self.operation[op % len(self)])
        return f"{op % len(self)} ({self.names[index]})" if index >= 0 else str(op % len(self))

    def with_seconds(self, seconds: NDArray[np.float64]) -> Step:
        """Return a copy with other operation times."""
        columns = {name: getattr(self, name) for name in _COLUMNS} | {"seconds": seconds}
        return Step(**columns, names=self.names, circular=self.circular)

"""A step as a graph: operations in execution order, and the values that they read and produce."""

from __future__ import annotations

import enum
import types
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from solvers.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

_OPERATIONS: Mapping[str, Any] = types.MappingProxyType(
    {
        "seconds": np.float64,
        "workspace": np.int64,
        "backward": np.bool_,
        "repeatable": np.bool_,
        "role": np.int8,
        "kind": np.int32,
        "module": np.int32,
    }
)
_VALUES: Mapping[str, Any] = types.MappingProxyType(
    {
        "size": np.int64,
        "producer": np.int64,
        "base": np.int64,
        "content": np.int64,
        "rank": np.int8,
        "lasting": np.bool_,
        "movable": np.bool_,
        "host": np.bool_,
    }
)


class Role(enum.IntEnum):
    """Purpose of an operation: original, or inserted by rewriting."""

    ORIGINAL = 0
    OFFLOAD = 1
    RELOAD = 2
    RECOMPUTED = 3


@dataclass(frozen=True, eq=False)
class Graph:
    """Graph of N operations in execution order and M values; read-only columns.

    Memory is counted by operation: the outputs of an operation take memory from the operation's start, and a
    value is freed at the end of its last reader. A value is a tensor; a view shares the memory of the
    ``base``. A value without a producer is an input: a parameter, a buffer, the batch.

    Attributes:
        seconds: float64[N], duration of each operation alone.
        workspace: int64[N], bytes of temporary memory that each operation takes while running.
        backward: bool[N], true for operations of the backward pass.
        repeatable: bool[N], true if a second run gives the same values: the operation is not random and
            overwrites no input.
        role: int8[N], a `Role`: ORIGINAL unless rewriting inserted the operation.
        kind: int32[N], index into ``kinds``.
        module: int32[N], index into ``modules``, -1 where unknown.
        size: int64[M], bytes; 0 of a view.
        producer: int64[M], the operation that produces the value, -1 of an input.
        base: int64[M], the value that owns the memory: the value itself, or for a view another value, which
            is no view.
        content: int64[M], the value of the original graph with the same contents: the value itself, or the
            original of a reloaded or recomputed value.
        rank: int8[M], number of dimensions, -1 where unknown.
        lasting: bool[M], alive after the step: outputs, and inputs that the caller keeps.
        movable: bool[M], true if the value may leave the device, unlike numbers and memory of other owners.
        host: bool[M], true if the value is in host memory.
        reads_start: int64[N+1], operation i reads ``reads[reads_start[i]:reads_start[i+1]]``.
        reads: int64[R], values in the order of the operation's arguments.
        control: int64[C, 2], pairs (earlier, later) of operations with a fixed order.
        names: N unique names of operations.
        kinds: the kinds of operations, such as ``aten.mm``.
        modules: paths of modules.

    Raises:
        PlanError: columns that break one of these rules, or an operation that reads a value before the
            producer.
    """

    seconds: NDArray[np.float64]
    workspace: NDArray[np.int64]
    backward: NDArray[np.bool_]
    repeatable: NDArray[np.bool_]
    role: NDArray[np.int8]
    kind: NDArray[np.int32]
    module: NDArray[np.int32]
    size: NDArray[np.int64]
    producer: NDArray[np.int64]
    base: NDArray[np.int64]
    content: NDArray[np.int64]
    rank: NDArray[np.int8]
    lasting: NDArray[np.bool_]
    movable: NDArray[np.bool_]
    host: NDArray[np.bool_]
    reads_start: NDArray[np.int64]
    reads: NDArray[np.int64]
    control: NDArray[np.int64]
    names: tuple[str, ...]
    kinds: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        edges = {"reads_start": np.int64, "reads": np.int64}
        for name, dtype in {**_OPERATIONS, **_VALUES, **edges}.items():
            self._set(name, np.asarray(getattr(self, name), dtype))
        self._set("control", np.asarray(self.control, np.int64).reshape(-1, 2))
        for faults in (self._numbers, self._faults):  # the first checks columns that the second uses
            for wrong, what in faults():
                if wrong:
                    raise PlanError(f"a graph {what}")

    def _set(self, name: str, column: NDArray[Any]) -> None:
        column = np.ascontiguousarray(column).view()
        column.flags.writeable = False
        object.__setattr__(self, name, column)

    def _numbers(self) -> list[tuple[bool, str]]:
        n, m = len(self.seconds), len(self.size)
        same = len(self.names) == n == len(self.reads_start) - 1
        same &= all(len(getattr(self, name)) == n for name in _OPERATIONS)
        same &= all(len(getattr(self, name)) == m for name in _VALUES)
        if not same:
            raise PlanError("a graph with columns of different lengths")
        start = self.reads_start
        whole = start[0] == 0 and start[-1] == len(self.reads) and bool((np.diff(start) >= 0).all())
        if not whole:
            raise PlanError("a graph whose reads are not divided among its operations")
        values = (self.reads, self.base, self.content)
        return [
            (
                any(bool(((ids < 0) | (ids >= m)).any()) for ids in values),
                "that names a value it does not have",
            ),
            (bool(((self.producer < -1) | (self.producer >= n)).any()), "with a value of no operation"),
            (bool(((self.control < 0) | (self.control >= n)).any()), "with an order of no operations"),
            (len(set(self.names)) != n, "with a name that two operations have"),
        ]

    def _faults(self) -> list[tuple[bool, str]]:
        view = self.base != np.arange(len(self.base))
        return [
            (not (np.isfinite(self.seconds) & (self.seconds >= 0)).all(), "with times that are none"),
            (bool((self.size < 0).any() or (self.workspace < 0).any()), "with a negative size"),
            (bool((self.producer[self.reads] >= self.reader).any()), "that reads a value before it is made"),
            (
                bool((self.control[:, 0] >= self.control[:, 1]).any()),
                "whose order is against its control edges",
            ),
            (bool((self.base[self.base] != self.base).any()), "with a view of a view"),
            (bool(self.size[view].any()), "with a view that has memory of its own"),
            (bool((self.host[self.base] != self.host).any()), "with a view that is elsewhere than its base"),
            (bool((self.content[self.content] != self.content).any()), "with a copy of a copy"),
        ]

    def __len__(self) -> int:
        return len(self.seconds)

    @cached_property
    def reader(self) -> NDArray[np.int64]:
        """Operation of each read, int64[R]."""
        return np.repeat(np.arange(len(self)), np.diff(self.reads_start))

    def read_by(self, operation: int) -> NDArray[np.int64]:
        """Return the values that an operation reads, in the order of the arguments."""
        return self.reads[self.reads_start[operation] : self.reads_start[operation + 1]]

    @cached_property
    def _by_value(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        order = np.argsort(self.reads, kind="stable")
        start = np.searchsorted(self.reads[order], np.arange(len(self.size) + 1))
        return start, self.reader[order]

    def readers_of(self, value: int) -> NDArray[np.int64]:
        """Return the operations that read a value, in order, once for each read."""
        start, readers = self._by_value
        return readers[start[value] : start[value + 1]]

    def with_columns(self, **columns: Any) -> Graph:
        """Return a copy with other columns."""
        return replace(self, **columns)

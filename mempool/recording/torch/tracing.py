"""Conversion of a recorder's rows to a trace, with marks of phases and categories of buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mempool.recording.torch.context import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE
from traces.trace import NAMED, EventType, Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mempool.recording.torch.ledger import Ledger
    from mempool.recording.torch.rows import Table

    Ints = NDArray[np.int64]

_MARKS = {FORWARD: "forward", BACKWARD: "backward", OPTIMIZER: "optimizer"}
#: Names of the marks that end iterations: set by the user, and detected from the optimizer's step.
STEP, FOUND_STEP = "step", "(step)"


def as_trace(
    table: Table, ledger: Ledger, operations: list[str], modules: list[str], more: dict[str, str]
) -> Trace:
    """Return the recorded trace.

    Args:
        table: the rows.
        ledger: the buffers' claims and devices.
        operations: names of operations and marks, by number.
        modules: paths of modules, by number.
        more: metadata.
    """
    step = _steps(table, operations)
    phase = _phases(table)
    alloc = table.kind == EventType.ALLOC
    buffer = table.buffer[alloc]
    claimed = _categories(table, ledger, _runs(phase, step))
    shown = [STEP if name == FOUND_STEP else name for name in operations]
    names = list(dict.fromkeys([*shown, *modules, *claimed, *_MARKS.values()]))
    number = {name: at for at, name in enumerate(names)}
    category = np.full(len(table.kind), -1)
    category[alloc] = [number[claimed[one]] for one in buffer.tolist()]
    module = table.module.copy()
    module[alloc] = [
        ledger.modules.get(one, at) for one, at in zip(buffer.tolist(), module[alloc].tolist(), strict=True)
    ]
    columns = {
        "kind": table.kind,
        "buffer": table.buffer,
        "size": np.where(alloc, _of(table.size, table.buffer), 0),
        "device": _of(_device_numbers(table, ledger), table.buffer),
        "thread": table.thread,
        "time_ns": table.time_ns,
        "operation": _of(np.array([number[name] for name in shown], np.int64), table.name, -1),
        "module": _of(np.array([number[name] for name in modules], np.int64), module, -1),
        "category": category,
    }
    dropped = (table.name >= 0) & (table.kind == EventType.MARK) & ~step & _found(table, operations)
    marked = _with_marks(columns, np.where(dropped, -1, phase), number, ~dropped)
    return Trace.of(**named_only(marked, names), metadata=_metadata(ledger) | more)


def named_only(columns: dict[str, Ints], names: list[str]) -> dict[str, Any]:
    """Return the columns with only the names that are used."""
    used = np.zeros(len(names) + 1, np.bool_)
    for column in NAMED:
        used[columns.get(column, np.empty(0, np.int64))] = True
    used[-1] = False
    place = np.append(np.cumsum(used[:-1]) - 1, -1)
    renamed = {column: place[columns[column]] for column in NAMED if column in columns}
    return (
        columns
        | renamed
        | {"names": tuple(name for name, keep in zip(names, used[:-1], strict=True) if keep)}
    )


def _of(values: Ints, index: Ints, unknown: int = 0) -> Ints:
    """Return the value at each index, or ``unknown`` for negative indices."""
    return np.append(values, unknown)[np.where(index < 0, len(values), index)]


def _named(table: Table, operations: list[str], name: str) -> NDArray[np.bool_]:
    number = operations.index(name) if name in operations else -2
    result: NDArray[np.bool_] = (table.kind == EventType.MARK) & (table.name == number)
    return result


def _found(table: Table, operations: list[str]) -> NDArray[np.bool_]:
    return _named(table, operations, FOUND_STEP)


def _steps(table: Table, operations: list[str]) -> NDArray[np.bool_]:
    """Return a mask of the marks that end iterations: the user's marks, else the detected marks."""
    told = _named(table, operations, STEP)
    return told if told.any() else _found(table, operations)


def _phases(table: Table) -> Ints:
    """Return the phase of each row; a free gets the phase of the previous row."""
    rows = np.arange(len(table.phase))
    last = np.maximum.accumulate(np.where(table.phase > 0, rows, 0))
    return table.phase[last] if len(last) else table.phase


def _runs(phase: Ints, step: NDArray[np.bool_]) -> Ints:
    """Return for each row the end of its forward phase; negative outside forward phases."""
    if not len(phase):
        return phase
    begins = np.ones(len(phase), np.bool_)
    begins[1:] = (phase[1:] != phase[:-1]) | step[1:]
    ends = np.append(np.flatnonzero(begins)[1:], len(phase))
    end = ends[np.cumsum(begins) - 1]
    return np.where((phase == FORWARD) | (phase == RECOMPUTE), end, -1)


def _categories(table: Table, ledger: Ledger, end: Ints) -> list[str]:
    """Return each buffer's category: claimed, else activation (alive after the forward) or temporary."""
    length = len(table.kind)
    alloc, free = np.flatnonzero(table.kind == EventType.ALLOC), np.flatnonzero(table.kind == EventType.FREE)
    birth, death = np.zeros(len(table.size), np.int64), np.full(len(table.size), length)
    birth[table.buffer[alloc]], death[table.buffer[free]] = alloc, free
    until = end[birth] if length else birth
    stays = (until >= 0) & (death >= until)
    claims = ledger.categories
    return [
        claims[buffer][1] if buffer in claims else ("activations" if kept else "temporaries")
        for buffer, kept in enumerate(stays.tolist())
    ]


def _device_numbers(table: Table, ledger: Ledger) -> Ints:
    """Return each buffer's device in the trace: the index of accelerators, then the host."""
    devices = list(ledger.devices)
    numbers = [device.index or 0 if device.type != "cpu" else -1 for device in devices]
    host = max(numbers, default=-1) + 1
    index = np.array([host if number < 0 else number for number in numbers] or [0], np.int64)
    return index[table.device]


def _metadata(ledger: Ledger) -> dict[str, str]:
    devices = list(ledger.devices)
    on_host = all(device.type == "cpu" for device in devices)
    return {
        "framework": "pytorch",
        "alignment": "64" if on_host else "512",
        "time": "operation",
        "devices": " ".join(str(device) for device in devices),
    }


def _with_marks(
    columns: dict[str, Ints], phase: Ints, number: dict[str, int], keep: NDArray[np.bool_]
) -> dict[str, Ints]:
    """Return the columns with a mark at each begin of a phase, without rows outside `keep`."""
    shown = np.where(phase == RECOMPUTE, BACKWARD, phase)
    before = np.append(0, shown[:-1])
    begins = np.flatnonzero((shown != before) & (shown > 0))
    rows = np.argsort(np.append(np.arange(len(phase)), begins - 0.5), kind="stable")
    rows = rows[np.append(keep, np.ones(len(begins), np.bool_))[rows]]
    kinds = shown[begins]
    names = np.array([0, *(number[_MARKS[kind]] for kind in (FORWARD, BACKWARD, OPTIMIZER))], np.int64)
    new = {
        "kind": np.full(len(begins), int(EventType.MARK)),
        "buffer": np.full(len(begins), -1),
        "operation": names[kinds],
        "time_ns": columns["time_ns"][begins],
        "thread": columns["thread"][begins],
        "module": np.full(len(begins), -1),
        "category": np.full(len(begins), -1),
    }
    nothing = np.zeros(len(begins), np.int64)
    return {name: np.append(values, new.get(name, nothing))[rows] for name, values in columns.items()}

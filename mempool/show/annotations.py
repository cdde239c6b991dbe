"""Annotations of a timeline: refused requests, marks, and nested named ranges of a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from traces.trace import RANGE_BEGIN, RANGE_END, EventType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces.trace import Trace


@dataclass(frozen=True, eq=False)
class Annotations:
    """The k refused requests, m marks and q ranges on a timeline's time axis; int64 columns.

    Attributes:
        refused: int64[k], time of each refused request.
        asked: int64[k], requested bytes.
        free: int64[k], free bytes of the device at each refused request, -1 where unknown.
        named: for each of "operation", "frame" and "stack" int64[k], index into the timeline's names or -1.
        mark: int64[m], time of each mark.
        mark_name: int64[m], index into names, -1 for a mark without a name.
        begin: int64[q], begin of each range.
        end: int64[q], exclusive.
        range_name: int64[q], as ``mark_name``.
        depth: int64[q], the number of enclosing ranges.
    """

    refused: NDArray[np.int64]
    asked: NDArray[np.int64]
    free: NDArray[np.int64]
    named: dict[str, NDArray[np.int64]]
    mark: NDArray[np.int64]
    mark_name: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    range_name: NDArray[np.int64]
    depth: NDArray[np.int64]


_NAMED = ("operation", "frame", "stack")
_NONE = np.zeros(0, np.int64)
NO_ANNOTATIONS = Annotations(
    _NONE, _NONE, _NONE, dict.fromkeys(_NAMED, _NONE), _NONE, _NONE, _NONE, _NONE, _NONE, _NONE
)


def annotations_of(trace: Trace, free: NDArray[np.int64] | None) -> Annotations:
    """Return the annotations of the events of one device.

    Args:
        trace: the events; their rows are the times.
        free: bytes free on the device at each refused request, -1 where unknown; None if all are unknown.
    """
    refused = np.flatnonzero(trace.kind == EventType.REFUSED)
    category = _categories(trace)
    mark = np.flatnonzero((trace.kind == EventType.MARK) & (category == ""))
    begin, end, depth = _ranges(category, trace.operation, len(trace))
    return Annotations(
        refused=refused,
        asked=trace.size[refused],
        free=np.full(len(refused), -1) if free is None else free,
        named={name: getattr(trace, name)[refused].astype(np.int64) for name in _NAMED},
        mark=mark,
        mark_name=trace.operation[mark].astype(np.int64),
        begin=begin,
        end=end,
        range_name=trace.operation[begin].astype(np.int64),
        depth=depth,
    )


def _categories(trace: Trace) -> NDArray[np.str_]:
    """Return the category of each mark that begins or ends a range; "" for other events."""
    told = np.array([name if name in (RANGE_BEGIN, RANGE_END) else "" for name in trace.names] + [""])
    return np.where(trace.kind == EventType.MARK, told[trace.category], "")


def _ranges(
    category: NDArray[np.str_], operation: NDArray[np.int32], last: int
) -> tuple[NDArray[np.int64], ...]:
    """Pair each end with the latest open beginning of the same name.

    A range without end lasts to the last event. An end without a beginning belongs to a range from before the
    recording. Ranges of several threads interleave.
    """
    opened: list[int] = []
    rows: list[tuple[int, int, int]] = []
    for row in np.flatnonzero(category != "").tolist():
        if category[row] == RANGE_BEGIN:
            opened.append(row)
            continue
        same = [at for at, begin in enumerate(opened) if operation[begin] == operation[row]]
        if same:
            rows.append((opened.pop(same[-1]), row, same[-1]))
    rows += [(row, last, depth) for depth, row in enumerate(opened)]
    rows.sort()
    begin, end, depth = np.array(rows, np.int64).reshape(-1, 3).T
    return begin, end, depth

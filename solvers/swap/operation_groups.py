"""Groups of operations of a long step; a schedule of the groups is valid for the step."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from solvers import _core

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.swap.absences import Absences
    from solvers.swap.link import Link
    from solvers.swap.step import Step


@dataclass(frozen=True, eq=False)
class OperationGroups:
    """Groups of operations; a group has the largest load and the total time of its operations.

    Attributes:
        first: int64[g], the first operation of each group.
        seconds: float64[g].
        load: int64[g], bytes.
        absences: the step's absences, with ``last`` and ``use`` as numbers of groups.
    """

    first: NDArray[np.int64]
    seconds: NDArray[np.float64]
    load: NDArray[np.int64]
    absences: Absences

    def native_planner(self, step: Step, link: Link) -> _core.OffloadPlanner:
        """Return a native planner of the groups.

        Only copies of buffers without writes count as already on the host.
        """
        a = self.absences
        kept = a.source == np.arange(len(a))
        return _core.OffloadPlanner(
            np.ascontiguousarray(self.seconds),
            np.ascontiguousarray(self.load),
            a.last,
            a.use,
            a.size,
            np.where(kept, 0.0, link.out(a.size)),
            link.back(a.size),
            np.where(kept, a.source, np.int32(-1)),
            step.circular,
            link.duplex,
        )

    def operations(self, groups: NDArray[np.int64], k: int) -> NDArray[np.int64]:
        """Return the first operation of each group.

        Numbers beyond one turn of k operations mean groups and operations of later turns.
        """
        turn, group = np.divmod(groups, len(self.first))
        result: NDArray[np.int64] = self.first[group] + turn * k
        return result

    def groups(self, operations: NDArray[np.int64], k: int) -> NDArray[np.int64]:
        """Return the group of each operation, with numbers as in `operations`."""
        turn, operation = np.divmod(operations, k)
        result: NDArray[np.int64] = (
            np.searchsorted(self.first, operation, side="right") - 1 + turn * len(self.first)
        )
        return result


def group_operations(step: Step, absences: Absences, *, most_ungrouped: int) -> OperationGroups:
    """Group the operations of a step with more than ``most_ungrouped``.

    Groups end at the begin and the end of the operations before and after absences.
    """
    k = len(step)
    if k <= most_ungrouped:
        first = np.arange(k, dtype=np.int64)
    else:
        even = np.linspace(0.0, step.duration, most_ungrouped, endpoint=False)
        borders: list[Any] = [
            np.minimum(np.searchsorted(step.begins, even), k - 1),
            absences.last,
            (absences.last + 1) % k,
            absences.use % k,
            [0],
        ]
        first = np.unique(np.concatenate(borders)).astype(np.int64)
    ends = np.append(first[1:], k)
    last = np.searchsorted(first, absences.last)
    turn, use = np.divmod(absences.use, k)
    return OperationGroups(
        first,
        step.begins[ends] - step.begins[first],
        np.maximum.reduceat(step.load, first) if k else step.load,
        dataclasses.replace(absences, last=last, use=np.searchsorted(first, use) + turn * len(first)),
    )

"""Number of columns (iterations until addresses repeat) for buffers that outlive an iteration.

``x = f(x)`` alternates between two addresses. But if k such buffers of one size are replaced one after the
other, each new buffer can use the slot that its predecessor just freed: k + 1 slots suffice, and addresses
repeat after k + 1 iterations. With two columns the same buffers need 2 k slots.

A buffer of less than one iteration that crosses the boundary ties the layouts of both sides together. With
more columns, successive iterations have different layouts: the arena of a Llama whose parameters are
offloaded shrank from 1.09 to 1.01 times its load (one column is proven to need 1.09).

So several numbers of columns are tried, one after the other, within one limit.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from solvers.packing.options import OPTIONS
from solvers.packing.plan import Plan, Status, Stop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from solvers.packing.progress import ProgressTotal
    from traces.buffers import Buffers


def columns_to_try(buffers: Buffers) -> list[int]:
    """Return the numbers of columns to try, the most promising first, including `Buffers.max_instances`."""
    least = buffers.max_instances
    outlives = buffers.period is not None and (buffers.end > buffers.period)[~buffers.persistent].any()
    if not outlives or (buffers.offset >= 0).any():
        return [least]
    longer = ~buffers.persistent & (buffers.instances > 1)
    sizes, count = np.unique(buffers.size[longer], return_counts=True)
    weight: dict[int, int] = {}
    for size, k in zip(sizes.tolist(), count.tolist(), strict=True):
        columns = max(least, k + least - 1)
        weight[columns] = weight.get(columns, 0) + size * k
    tried = sorted(weight, key=lambda columns: -weight[columns])
    most = min(OPTIONS.columns, max(least, OPTIONS.unrolled_rows // len(buffers)))
    tried = [columns for columns in [*tried, least, least + 1, least + 2] if columns <= most]
    chosen = list(dict.fromkeys([*tried, least]))[: OPTIONS.column_counts]
    return chosen if least in chosen else [*chosen[:-1], least]


class Attempts:
    """Attempts with several numbers of columns; iteration yields each attempt's number and limits.

    A proof for one number of columns proves nothing for other numbers. A plan counts as optimal if no number
    tried can give a smaller arena.

    Args:
        columns: the numbers of columns to try, the most promising first.
        stop: limits of all attempts together.
        total: work and time of all attempts so far.
    """

    def __init__(self, columns: Sequence[int], stop: Stop, total: ProgressTotal) -> None:
        self._columns, self._stop, self._total = columns, stop, total
        self._plans = dict[int, Plan]()

    def __iter__(self) -> Iterator[tuple[int, Stop]]:
        for k, columns in enumerate(self._columns):
            yield columns, self._part(1 / (len(self._columns) - k))

    def _part(self, share: float) -> Stop:
        """Return this share of the remaining limits."""
        stop, total = self._stop, self._total
        nodes = stop.node_budget
        return dataclasses.replace(
            stop,
            nodes=None if nodes is None else int(max(nodes - total.nodes, 0) * share),
            seconds=None if stop.seconds is None else max(stop.seconds - total.seconds, 0.0) * share,
        )

    def add(self, columns: int, plan: Plan) -> None:
        """Record an attempt's plan."""
        self._plans[columns] = plan

    @property
    def best(self) -> Plan | None:
        """Return the plan with the smallest arena; without any, prefer a plan that is not infeasible."""
        return min(self._plans.values(), key=_rank, default=None)

    def combined(self, bound: int, stopped_by: str = "") -> Plan:
        """Return the best plan, with bound and status valid for all numbers of columns tried.

        Args:
            bound: lower bound in bytes for any number of columns.
            stopped_by: reason that stopped all attempts, if other than the best plan's reason.
        """
        best = self.best
        assert best is not None
        all_tried = len(self._plans) == len(self._columns)
        if best.status is Status.INFEASIBLE and best.stopped_by == "proof" and not all_tried:
            best = dataclasses.replace(best, status=Status.UNKNOWN, reason="stopped before there was a plan")
        if all_tried:
            bound = min(plan.lower_bound_bytes for plan in self._plans.values())
        stopped_by = stopped_by or best.stopped_by
        proven = best.offset is not None and best.arena_bytes <= bound
        if best.status is Status.OPTIMAL and not proven and stopped_by in ("bound", "proof"):
            stopped_by = self._limit or "finished"
        return dataclasses.replace(
            best,
            lower_bound_bytes=min(best.lower_bound_bytes, bound),
            status=Status.FEASIBLE if best.status is Status.OPTIMAL and not proven else best.status,
            stopped_by=stopped_by,
            seconds=self._total.seconds,
            nodes=self._total.nodes,
        )

    @property
    def _limit(self) -> str:
        """Return a limit that any attempt reached, or ""."""
        reached = {plan.stopped_by for plan in self._plans.values()}
        return next((limit for limit in ("interrupt", "time", "nodes") if limit in reached), "")


def _arena(plan: Plan) -> tuple[bool, int]:
    return plan.offset is None, plan.arena_bytes


def _rank(plan: Plan) -> tuple[bool, int, bool]:
    """Return a sort key that puts the best plan first.

    Infeasible plans are last, because other numbers of columns may be feasible.
    """
    return *_arena(plan), plan.status is Status.INFEASIBLE

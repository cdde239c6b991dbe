"""After how many iterations addresses should repeat, where buffers live longer than one.

``x = f(x)`` needs two addresses in turn. But of k such buffers of one size that are replaced one after the
other, each can move into the place that the one before it has just left: k + 1 places are enough, and the
addresses repeat after k + 1 iterations. With two columns the same buffers need 2 k places.

So several numbers of columns are tried, one after the other within one limit.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from solvers.plan import Plan, Status, Stop

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from solvers.progress import Total
    from traces.buffers import Buffers

#: Rows of an unrolled problem that are still quick to pack.
_MOST_ROWS = 100_000
_MOST_COLUMNS = 32
_MOST_TRIED = 4
#: What the first round may spend of the limits; most numbers are done with in it.
_FIRST_ROUND = 1 / 8


def columns_to_try(buffers: Buffers) -> list[int]:
    """Numbers of columns, the most promising first; `Buffers.max_instances` is always among them."""
    least = buffers.max_instances
    if least == 1 or (buffers.offset >= 0).any():
        return [least]
    longer = ~buffers.persistent & (buffers.instances > 1)
    sizes, count = np.unique(buffers.size[longer], return_counts=True)
    weight: dict[int, int] = {}
    for size, k in zip(sizes.tolist(), count.tolist(), strict=True):
        columns = max(least, k + least - 1)
        weight[columns] = weight.get(columns, 0) + size * k
    tried = sorted(weight, key=lambda columns: -weight[columns])
    most = min(_MOST_COLUMNS, max(least, _MOST_ROWS // len(buffers)))
    tried = [columns for columns in [*tried, least, least + 1, least + 2] if columns <= most]
    chosen = list(dict.fromkeys([*tried, least]))[:_MOST_TRIED]
    return chosen if least in chosen else [*chosen[:-1], least]


class Attempts:
    """The plans with each number of columns; iterating gives the numbers and the limits of the next attempt.

    What is proven for one number of columns says nothing of another: optimal is what none tried can beat.

    Args:
        columns: the numbers to try, the most promising first.
        stop: limits of all together.
        total: what all have taken so far.
        rounds: whether a first round is short, so that one that takes long leaves time for the others, and
            those that are soon done leave theirs to it.
    """

    def __init__(self, columns: Sequence[int], stop: Stop, total: Total, *, rounds: bool) -> None:
        self._columns, self._stop, self._total = columns, stop, total
        self._shares = (_FIRST_ROUND, 1.0) if rounds and len(columns) > 1 else (1.0,)
        self._plans = dict[int, Plan]()

    def __iter__(self) -> Iterator[tuple[int, Stop]]:
        for share in self._shares:
            waiting = [columns for columns in self._columns if not self._ended(columns)]
            for k, columns in enumerate(waiting):
                part = self._part(share / (len(waiting) - k if share == 1 else len(waiting)))
                if columns not in self._plans or 0 not in (part.nodes, part.seconds):
                    yield columns, part

    def _ended(self, columns: int) -> bool:
        return columns in self._plans and self._plans[columns].stopped_by not in ("nodes", "time")

    def _part(self, share: float) -> Stop:
        """This share of what is left of the limits."""
        stop, total = self._stop, self._total
        nodes = stop.node_budget
        return dataclasses.replace(
            stop,
            nodes=None if nodes is None else int(max(nodes - total.nodes, 0) * share),
            seconds=None if stop.seconds is None else max(stop.seconds - total.seconds, 0.0) * share,
        )

    def add(self, columns: int, plan: Plan) -> None:
        """An attempt has ended: the last word on its number of columns, unless its arena is larger."""
        earlier = self._plans.get(columns)
        if earlier is None or _arena(plan) <= _arena(earlier):
            self._plans[columns] = plan

    @property
    def best(self) -> Plan | None:
        """The smallest so far; where none has offsets, one that does not claim that there are none."""
        return min(self._plans.values(), key=_rank, default=None)

    def together(self, bound: int, stopped_by: str = "") -> Plan:
        """The best, judged by a bound that holds for all of them.

        Args:
            bound: bytes; holds for any number of columns.
            stopped_by: what stopped all of them, if it was not what stopped the best.
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
        """Which limit some number of columns has reached; "" if none has."""
        reached = {plan.stopped_by for plan in self._plans.values()}
        return next((limit for limit in ("interrupt", "time", "nodes") if limit in reached), "")


def _arena(plan: Plan) -> tuple[bool, int]:
    return plan.offset is None, plan.arena_bytes


def _rank(plan: Plan) -> tuple[bool, int, bool]:
    """Smaller is better: that there is none with one number of columns does not settle it."""
    return *_arena(plan), plan.status is Status.INFEASIBLE

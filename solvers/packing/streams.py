"""Address sharing between CUDA streams: trades arena bytes against stream waits.

Before a stream uses memory that another stream freed, it must wait for the other stream's queued work, so
sharing addresses saves bytes and costs time. Streams that share no addresses are packed as separate groups.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from solvers._core import count_waits
from solvers.packing.bounds import lower_bound, peak_load
from solvers.packing.options import OPTIONS
from solvers.packing.plan import Status, Stop
from solvers.packing.progress import Budget, ProgressTotal
from solvers.packing.solve import solve
from traces.columns import distinct, numbered

if TYPE_CHECKING:
    from collections.abc import Callable
    from fractions import Fraction

    from solvers.packing.plan import Plan
    from solvers.packing.progress import Progress
    from traces.buffers import Buffers


#: Value of `wait_bytes` at which streams share no addresses.
NEVER = 2**63 - 1


def waits(plan: Plan, buffers: Buffers) -> float:
    """Return the mean number of waits of one stream for another per iteration, in steady state.

    A stream that gets memory which another stream freed last waits for that free, unless the stream has
    waited for the other stream since that free.

    Args:
        plan: a plan with offsets for these buffers.
        buffers: the buffers, with their streams.
    """
    assert plan.offset is not None
    rows = (~buffers.persistent & (buffers.size > 0) & (buffers.lengths > 0)).nonzero()[0]
    if len(rows) == 0:
        return 0.0
    stream = numbered(buffers.stream[rows])[1]
    counted = count_waits(
        buffers.start[rows],
        buffers.end[rows],
        buffers.size[rows],
        stream,
        np.ascontiguousarray(plan.offset[rows]).ravel(),
        columns=plan.columns,
        period=buffers.period or 0,
    )
    return counted / plan.columns


def solve_streams(
    buffers: Buffers,
    *,
    wait_bytes: int,
    stop: Stop | None = None,
    capacity: int | None = None,
    close_enough: float | Fraction | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    **arguments: Any,
) -> Plan:
    """Make a plan in which streams share addresses if this saves enough bytes.

    The first attempt packs each stream separately. The second packs all streams together. With few streams
    and no capacity, further attempts pack pairs of streams whose loads peak at different times, one pair
    after the other, while the possible saving exceeds the price of the waits.

    Args:
        buffers: the buffers to place; groups never share addresses.
        wait_bytes: bytes that a plan must save for each wait in an iteration. 0: search for the smallest
            arena. `NEVER`: streams share no addresses.
        stop: limits; the node limit applies to each attempt. No attempt follows once the target is reached.
        capacity: bytes; accept the first plan that fits, with any number of waits unless `wait_bytes` is
            `NEVER`.
        close_enough: largest ratio of arena to lower bound at which the search for a smaller arena stops.
        on_progress: as for `solve`. The reported arena may come from an attempt with too many waits.
        arguments: the other arguments of `solve`.

    Raises:
        ValueError: as `solve`, or a negative price.
        KeyboardInterrupt: the user interrupted before any plan was found.
    """
    if wait_bytes < 0:
        raise ValueError(f"a wait cannot be worth {wait_bytes} bytes")
    placed = ~buffers.persistent & (buffers.offset < 0)
    streams = distinct(buffers.stream[placed]).tolist()
    separate = [frozenset([stream]) for stream in streams]
    search = _Search(buffers, wait_bytes, stop or Stop(), capacity, close_enough, on_progress, arguments)
    search.attempt(separate)
    if len(streams) > 1 and wait_bytes < NEVER:
        search.share(separate, [frozenset(streams)])
    return search.result()


class _Search:
    """Search over partitions of the streams, with the best plan so far and its cost in bytes."""

    def __init__(
        self,
        buffers: Buffers,
        wait_bytes: int,
        stop: Stop,
        capacity: int | None,
        close_enough: float | Fraction | None,
        on_progress: Callable[[Progress], None] | None,
        arguments: dict[str, Any],
    ) -> None:
        self._buffers, self._price, self._stop = buffers, wait_bytes, stop
        self._capacity, self._close_enough, self._arguments = capacity, close_enough, arguments
        self._total = ProgressTotal(on_progress)
        self._enough = max(self._stop.target_bytes or 0, capacity or 0)
        self._budget = Budget(stop)
        self._bound = lower_bound(buffers)
        self._attempts = 0
        self._best: Plan | None = None
        self._cost = self._last_cost = math.inf
        self._stopped_by = ""
        self._load = functools.cache(self._load_of)

    def attempt(self, parts: list[frozenset[int]]) -> None:
        """Make a plan in which these parts share no addresses; keep the cheaper plan."""
        separate, all_share = self._grouped(parts), len(parts) <= 1
        holds = all_share or self._price >= NEVER
        report = self._total.callback(lambda bound: max(bound, self._bound) if holds else self._bound)
        enough = self._stop.target_bytes
        if self._close_enough is not None:
            enough = int(lower_bound(separate) * self._close_enough)
        stop = dataclasses.replace(self._stop, target_bytes=enough, seconds=self._budget.seconds_left)
        try:
            plan = solve(separate, capacity=self._capacity, stop=stop, on_progress=report, **self._arguments)
        except KeyboardInterrupt:
            if self._best is None:
                raise
            self._stopped_by = "interrupt"
            return
        self._attempts += 1
        self._total.add(plan)
        if all_share:  # a bound for shared streams is valid for any partition
            self._bound = max(self._bound, plan.lower_bound_bytes)
        if plan.stopped_by == "interrupt":
            self._stopped_by = "interrupt"
        self._last_cost = math.inf
        if plan.offset is not None:
            count = waits(plan, self._buffers) if self._price else 0
            self._last_cost = plan.arena_bytes + self._price * count
        if self._best is None or self._best.offset is None or self._last_cost < self._cost:
            self._best, self._cost = plan, self._last_cost

    def share(self, separate: list[frozenset[int]], merged: list[frozenset[int]]) -> None:
        """Search for a cheaper plan than with all streams separate."""
        assert self._best is not None
        parts, cost = separate, self._last_cost
        if self._may_go_on() and (self._best.offset is None or self._saves(separate, merged) > self._price):
            self.attempt(merged)
        if not 2 < len(separate) <= OPTIONS.streams or self._capacity is not None:
            return
        refused: set[frozenset[int]] = set()
        while self._attempts < OPTIONS.stream_plans and self._may_go_on():
            pairs = [first | second for first, second in itertools.combinations(parts, 2)]
            pairs = [pair for pair in pairs if pair not in refused]
            saved = [self._saves(parts, _merge(parts, pair)) for pair in pairs]
            if not saved or max(saved) <= self._price:  # less than the price of a single wait
                return
            pair = pairs[saved.index(max(saved))]
            self.attempt(_merge(parts, pair))
            if self._last_cost < cost:
                parts, cost = _merge(parts, pair), self._last_cost
            else:
                refused.add(pair)

    def result(self) -> Plan:
        """Return the best plan, with bound, status and stop reason valid for any partition of the streams."""
        assert self._best is not None
        plan = dataclasses.replace(self._best, seconds=self._budget.seconds, nodes=self._total.nodes)
        if self._stopped_by:
            plan = dataclasses.replace(plan, stopped_by=self._stopped_by)
        bound = self._bound
        if plan.offset is None or plan.lower_bound_bytes == bound or self._price >= NEVER:
            return plan
        if plan.arena_bytes <= bound:
            return dataclasses.replace(plan, lower_bound_bytes=bound, status=Status.OPTIMAL)
        proven = plan.stopped_by in ("bound", "proof")  # proven only for separate streams
        stopped_by = plan.stopped_by
        if proven:
            stopped_by = "target" if plan.arena_bytes <= self._enough else "finished"
        return dataclasses.replace(
            plan, lower_bound_bytes=bound, status=Status.FEASIBLE, stopped_by=stopped_by
        )

    def _may_go_on(self) -> bool:
        if not self._stopped_by:
            self._stopped_by = self._budget.reached_limit(check_nodes=False)
        best = self._best
        enough = best is not None and best.offset is not None and best.arena_bytes <= self._enough
        return not self._stopped_by and not enough

    def _saves(self, parts: list[frozenset[int]], merged: list[frozenset[int]]) -> int:
        """Return the largest saving in bytes of partition `merged` over `parts`, by peak loads."""
        return sum(map(self._load, parts)) - sum(map(self._load, merged))

    def _load_of(self, part: frozenset[int]) -> int:
        """Return the sum of the groups' peak loads in bytes for the streams in `part`."""
        b = self._buffers
        rows = np.flatnonzero(np.isin(b.stream, list(part)) & ~b.persistent & (b.offset < 0))
        groups = distinct(b.group[rows])
        return sum(peak_load(b.select(rows[b.group[rows] == group])) for group in groups)

    def _grouped(self, parts: list[frozenset[int]]) -> Buffers:
        """Return the buffers with one group per part, and with their fixed offsets."""
        b = self._buffers
        part = np.zeros(len(b), np.int64)
        for k, streams in enumerate(parts):
            part[np.isin(b.stream, list(streams)) & (b.offset < 0)] = k
        return dataclasses.replace(b, group=numbered(b.group * max(len(parts), 1) + part)[1])


def _merge(parts: list[frozenset[int]], pair: frozenset[int]) -> list[frozenset[int]]:
    return [pair, *(part for part in parts if not part <= pair)]

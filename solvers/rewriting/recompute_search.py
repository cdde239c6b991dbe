"""Search for promising sets of values to recompute, given a limit and a link.

Minimum cuts at prices of memory propose sets; an estimate of the step's seconds ranks the sets.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from solvers.errors import PlanError
from solvers.rewriting.copy_overhead import CopyOverhead
from solvers.rewriting.records import DEFAULTS
from solvers.rewriting.step_conversion import GraphStep, graph_step
from solvers.swap.absences import absences_of
from solvers.swap.operation_groups import group_operations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from solvers.rewriting.graph import Graph
    from solvers.swap.link import Link
    from solvers.swap.step import Step

#: Total of all costs as whole numbers in the cut; and the cost of a forbidden arc, more than this total.
_TOTAL = 1 << 50
_NEVER = 1 << 56

Set = tuple[int, ...]


class RecomputeSearch:
    """Search for sets of values to recompute in one graph, ranked by seconds of the step; deterministic.

    Args:
        graph: the graph.
        link: the copy times.
        movable: bool[M], values that may be offloaded.
        repeatable: bool[M], values that may be recomputed.
        outside: bytes always on the device outside the graph.
        host_limit: most bytes that the host holds.
        overhead: seconds of the program itself for copies.
    """

    def __init__(
        self,
        graph: Graph,
        link: Link,
        movable: NDArray[np.bool_],
        repeatable: NDArray[np.bool_],
        *,
        outside: int,
        host_limit: int | None = None,
        overhead: CopyOverhead = CopyOverhead(),  # noqa: B008  # frozen
    ) -> None:
        self._host_limit, self._overhead = host_limit, overhead
        self._graph, self._link, self._movable, self._outside = graph, link, movable, outside
        self._cuts = RecomputeCuts(graph, repeatable)
        self._estimates: dict[Set, StepEstimate | None] = {}
        self._place = _places(graph, self._cuts.saved)
        self._crossings: dict[int, NDArray[np.bool_]] = {}

    def sets(self, limit: int, most: int) -> list[Set]:
        """Return the most promising sets at a limit, best first."""
        found: dict[Set, tuple[float, int]] = {}
        prices: dict[Set, NDArray[np.float64]] = {}
        plain = float(self._graph.seconds.sum())
        budget = max(
            min(DEFAULTS.most_sets, DEFAULTS.set_work // max(len(self._graph), 1)), DEFAULTS.least_sets
        )

        def evaluate(price: NDArray[np.float64]) -> bool:
            """Evaluate the set at these prices.

            Return false if already known, or too slow even without waits.
            """
            chosen, seconds = self._cuts.cheapest(price)
            if chosen in found or plain + seconds > min(found.values(), default=(np.inf, 0))[0]:
                return False
            found[chosen] = self._cost(chosen, limit)
            prices[chosen] = price
            return True

        evaluate(np.zeros(len(self._graph.size)))
        first, random, misses = self._initial_prices(), np.random.default_rng(0), 0
        while len(found) < budget and misses < 2 * budget and min(found.values())[0] > plain:
            price = next(first, None)
            if price is None:
                ranked = sorted(found, key=lambda chosen: (found[chosen], chosen))
                price = self._vary_prices(
                    prices[ranked[min(int(random.exponential(1.5)), len(ranked) - 1)]], random
                )
            misses += not evaluate(price)
        ranked = sorted(found, key=lambda chosen: (found[chosen], chosen))
        return [chosen for chosen in ranked if np.isfinite(found[chosen][0])][:most]

    def least(self) -> tuple[int, int, Set]:
        """Return the least feasible bytes, the operation that needs them, and the recomputed values.

        If all saved values may move, no recompute is needed; otherwise all sets at the initial prices are
        tried.
        """
        self._cost((), 0)
        if (self._cuts.saved & ~self._movable & (self._graph.size > 0)).any():
            prices = itertools.islice(
                self._initial_prices(),
                None if len(self._graph) <= DEFAULTS.many_operations else DEFAULTS.price_levels,
            )
            for price in prices:
                self._cost(self._cuts.cheapest(price)[0], 0)
        known = [
            (q.floor_bytes, len(chosen), chosen) for chosen, q in self._estimates.items() if q is not None
        ]
        least, _, chosen = min(known)
        estimate = self._estimates[chosen]
        assert estimate is not None
        return least, int(self._plan(chosen).runs[estimate.floor_op]) % len(self._graph), chosen

    def _plan(self, chosen: Set) -> GraphStep:
        return graph_step(self._graph, self._movable, recomputed=chosen, outside=self._outside)

    def _cost(self, chosen: Set, limit: int) -> tuple[float, int]:
        """Return the seconds, infinite if the limit is infeasible, and the recomputed bytes."""
        if chosen not in self._estimates:
            self._estimates[chosen] = self._estimate(chosen)
        estimate = self._estimates[chosen]
        seconds = float("inf") if estimate is None else estimate.seconds(limit)
        return seconds, int(self._graph.size[list(chosen)].sum())

    def _estimate(self, chosen: Set) -> StepEstimate | None:
        try:
            return StepEstimate(self._plan(chosen).step, self._link, self._host_limit, self._overhead)
        except PlanError:  # e.g. a control edge forbids the recompute
            return None

    def _initial_prices(self) -> Iterator[NDArray[np.float64]]:
        """Yield uniform prices per byte, then prices at which values that cross segment borders are free.

        If copies cost time of the program, also yield uniform prices capped at the cost of moving each value.
        """
        levels, size = self._price_levels(), self._graph.size.astype(np.float64)
        for level in levels:
            yield level * size
        if self._overhead != CopyOverhead():
            moved = np.where(self._movable, 2 * self._overhead.seconds_of(self._graph.size), np.inf)
            for level in levels:
                yield np.minimum(level * size, moved)
        for count in DEFAULTS.segments:
            for level in (levels[-1], levels[len(levels) // 2]):
                yield np.where(self._crossing(count), 0.0, level * self._graph.size)

    def _price_levels(self) -> list[float]:
        """Return prices in seconds per byte, from the cheapest to the most expensive operation."""
        g = self._graph
        made = (g.producer >= 0) & (g.size > 0)
        made[made] = ~g.backward[g.producer[made]]
        rates = g.seconds[g.producer[made]] / g.size[made]
        rates = rates[rates > 0]
        if not len(rates):
            return [1.0]
        marks = np.quantile(rates, np.linspace(0.0, 1.0, DEFAULTS.price_levels))
        return [
            float(x) for x in np.unique(np.concatenate([1.5 * marks, 4.0 * marks[-1:], 1e3 * marks[-1:]]))
        ]

    def _crossing(self, count: int) -> NDArray[np.bool_]:
        """Return a mask of memories produced in one of ``count`` forward segments and read in a later one."""
        if count not in self._crossings:
            g = self._graph
            forward = np.flatnonzero(~g.backward)
            borders = _borders(g, count)
            segment = np.searchsorted(borders, np.arange(len(g)), side="right")
            reads = ~g.backward[g.reader]
            last = np.full(len(g.size), -1)
            np.maximum.at(last, g.base[g.reads[reads]], segment[g.reader[reads]])
            first = np.where(g.producer >= 0, segment[np.maximum(g.producer, 0)], 0)
            self._crossings[count] = (last > first) if len(forward) else np.zeros(len(g.size), np.bool_)
        return self._crossings[count]

    def _vary_prices(self, price: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.float64]:
        """Return varied prices: free or expensive in a section of the forward pass, or randomly changed."""
        g, place = self._graph, self._place
        middle, width = random.random(), random.random() ** 3
        low, high = middle - width / 2, middle + width / 2
        kind = random.integers(0, 6)
        if kind == 0:  # values produced late in the forward pass have short absences
            return np.where(place > high, 0.0, price)
        if kind == 1:
            return np.where(place < low, 0.0, price)
        inside = (place >= low) & (place <= high)
        if kind == 2:
            return np.where(inside, 0.0, price)
        levels = np.array([0.0, *self._price_levels()])
        if kind == 3:
            return np.where(inside, random.choice(levels) * g.size, price)
        if kind == 4:
            some = inside & (random.random(len(g.size)) < 0.3)
            return np.where(some, random.choice([0.0, 1.0]) * random.choice(levels) * g.size, price)
        few = random.choice([3 / max(len(g.size), 1), 0.1, 0.3])
        some = random.random(len(g.size)) < few
        return np.where(some, random.choice(levels, len(g.size)) * g.size, price)


def _places(graph: Graph, saved: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return each memory's position in the forward pass: the share of earlier saved bytes, float64[M]."""
    order = np.argsort(graph.producer, kind="stable")
    bytes_before = np.cumsum(np.where(saved, graph.size, 0)[order])
    place = np.empty(len(graph.size))
    place[order] = bytes_before / max(int(bytes_before[-1]), 1) if len(order) else 0.0
    return place


def _borders(graph: Graph, count: int) -> NDArray[np.int64]:
    """Return the first operations of segments of about equal bytes; few bytes cross their borders."""
    g = graph
    forward = np.flatnonzero(~g.backward)
    made = np.zeros(len(g) + 1)
    rows = np.flatnonzero(g.producer >= 0)
    np.add.at(made, g.producer[rows] + 1, g.size[rows])
    before = np.cumsum(made)[forward] if len(forward) else np.zeros(0)
    alive = _crossing_bytes(g)[forward] if len(forward) else np.zeros(0)
    borders = []
    for k in range(1, count):
        near = np.abs(before - k / count * before[-1]) <= before[-1] / (4 * count) if len(forward) else []
        rows = np.flatnonzero(near)
        if len(rows):
            borders.append(int(forward[rows[alive[rows].argmin()]]))
    return np.array(sorted(set(borders)), np.int64)


def _crossing_bytes(graph: Graph) -> NDArray[np.int64]:
    """Return the bytes made before, and read in the forward pass at or after, each operation, int64[N]."""
    g, n = graph, len(graph)
    made = (g.producer >= 0) & (g.base == np.arange(len(g.size)))
    last = np.full(len(g.size), -1)
    reads = ~g.backward[g.reader]
    np.maximum.at(last, g.base[g.reads[reads]], g.reader[reads])
    rows = np.flatnonzero(made & (last > g.producer))
    change = np.zeros(n + 2, np.int64)
    np.add.at(change, g.producer[rows] + 1, g.size[rows])
    np.add.at(change, last[rows] + 1, -g.size[rows])
    result: NDArray[np.int64] = np.cumsum(change)[:n]
    return result


class StepEstimate:
    """Estimate of a step's duration within a limit, from a single schedule.

    The schedule uses absences in order of their start.

    Attributes:
        floor_bytes: bytes that the step needs if every absence is used at full length.
        floor_op: the operation that needs `floor_bytes`.
    """

    def __init__(
        self,
        step: Step,
        link: Link,
        host_limit: int | None = None,
        overhead: CopyOverhead = CopyOverhead(),  # noqa: B008  # frozen
    ) -> None:
        self._host_limit = host_limit
        absences = absences_of(step)
        load = step.load - step.spread(absences.last + 1, absences.use, absences.size)
        self.floor_op = int(load.argmax())
        self.floor_bytes = int(load[self.floor_op])
        absences = absences_of(
            step,
            least_bytes=min(DEFAULTS.estimate_least_bytes, step.peak_bytes // DEFAULTS.estimate_least_share),
        )
        groups = group_operations(step, absences, most_ungrouped=DEFAULTS.estimate_operations)
        a = groups.absences
        self._copy_seconds = 2 * overhead.seconds_of(a.size)  # out and back
        self._order = np.argsort(a.last, kind="stable").astype(np.int32)
        self._peak, self._seconds = step.peak_bytes, step.duration
        self._native = groups.native_planner(step, link)

    def seconds(self, limit: int) -> float:
        """Return the seconds of the step, infinite if the limit is infeasible."""
        if self._peak <= limit:
            return self._seconds
        away = self._peak - limit  # lower bound
        if self.floor_bytes > limit or (self._host_limit is not None and away > self._host_limit):
            return float("inf")
        rows, _, _, stall, _ = self._native.plan(self._order, limit, 1)
        return float(self._seconds + stall + self._copy_seconds[rows].sum())


class RecomputeCuts:
    """Values to recompute at a price, as a minimum cut of the forward pass.

    A recomputed forward operation costs its seconds. Each memory that the backward pass or a recomputed
    operation needs is either kept, at a price, or made by a recomputed operation. The least sum of both costs
    is a minimum cut, as in PyTorch's min-cut partitioner, but in seconds instead of bytes.

    Attributes:
        saved: bool[M], the memories that the backward pass reads itself.
    """

    def __init__(self, graph: Graph, allowed: NDArray[np.bool_]) -> None:
        """Build the arcs of the cut; ``allowed``, bool[M], marks the values that may be recomputed."""
        g = graph
        n = len(g)
        self._graph = g
        forward = (g.producer >= 0) & ~g.backward[g.producer]
        self._own = np.flatnonzero(forward & (g.base == np.arange(len(g.size))))
        self._row = np.full(len(g.size), -1)
        self._row[self._own] = np.arange(len(self._own))
        self.saved = np.zeros(len(g.size), np.bool_)
        self.saved[g.base[g.reads[g.backward[g.reader]]]] = True
        self.saved &= self._row >= 0
        banned = ~g.repeatable
        banned[g.producer[forward & ~allowed]] = True
        # A view that cannot be recomputed keeps its base, so the base is not recomputed.
        views = np.flatnonzero(forward & (g.base != np.arange(len(g.size))))
        stiff = views[banned[g.producer[views]]]
        makers = g.producer[g.base[stiff]]
        banned[makers[makers >= 0]] = True
        # An operation with a control edge to a later operation is not recomputed.
        banned[g.control[:, 0]] = True
        self._banned = banned & ~g.backward
        self._arcs(n)

    def _arcs(self, n: int) -> None:
        """Build the arcs; nodes: operation i is i, memory j is n + j, then the source and the sink."""
        g, memories = self._graph, len(self._own)
        self._source, self._sink = n + memories, n + memories + 1
        self._operations = np.flatnonzero(~g.backward)
        reads = ~g.backward[g.reader] & (self._row[g.base[g.reads]] >= 0)
        needed = n + self._row[g.base[g.reads[reads]]]
        must = n + self._row[np.flatnonzero(self.saved)]
        self._tail = np.concatenate(
            [np.full(len(self._operations), self._source), g.producer[self._own], needed, must]
        )
        self._head = np.concatenate(
            [self._operations, n + np.arange(memories), g.reader[reads], np.full(len(must), self._sink)]
        )
        self._fixed = len(needed) + len(must)

    def cheapest(self, price: NDArray[np.float64]) -> tuple[tuple[int, ...], float]:
        """Return the memories to recompute, and the seconds of recompute.

        ``price`` is the price in seconds of keeping each memory, float64[M].
        """
        from ortools.graph.python import max_flow

        g = self._graph
        seconds = np.where(self._banned, 0.0, g.seconds)[self._operations]
        cost = np.maximum(price[self._own], 0.0)
        unit = _TOTAL / max(float(seconds.sum() + cost.sum()), 1e-30)
        recompute = np.where(self._banned[self._operations], _NEVER, (seconds * unit).astype(np.int64) + 1)
        keep = (cost * unit).astype(np.int64)
        capacity = np.concatenate([recompute, keep, np.full(self._fixed, _NEVER)]).astype(np.int64)
        solver = max_flow.SimpleMaxFlow()
        solver.add_arcs_with_capacity(self._tail.astype(np.int32), self._head.astype(np.int32), capacity)
        if solver.solve(self._source, self._sink) != solver.OPTIMAL:
            return (), 0.0
        sinks = np.zeros(self._sink + 1, np.bool_)
        sinks[solver.get_sink_side_min_cut()] = True
        needed = sinks[len(g) + np.arange(len(self._own))]
        made = needed & sinks[g.producer[self._own]]
        runs = np.unique(g.producer[self._own[made]])
        return tuple(self._own[made].tolist()), float(g.seconds[runs].sum())

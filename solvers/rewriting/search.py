"""Search for promising sets of values to recompute, at a limit and a link."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from solvers.errors import PlanError
from solvers.rewriting.copy_calls import Calls
from solvers.rewriting.quick_estimate import Quick
from solvers.rewriting.recompute import Cuts
from solvers.rewriting.step_conversion import Planned, planned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from solvers.rewriting.graph import Graph
    from solvers.swap.link import Link

#: Operations visited by the search for one limit in total: some seconds.
_WORK = 400_000
_LEAST_TRIES, _MOST_TRIES = 8, 400
_LEVELS = 8
#: In graphs of more operations, `Search.least` tries uniform prices alone.
_MANY = 4000
_SEGMENTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)

Set = tuple[int, ...]


class Search:
    """Sets of values to recompute in one graph, with the seconds of a step at a limit. Deterministic.

    Args:
        graph: the graph.
        link: the copy times.
        movable: bool[M], values that may be offloaded.
        repeatable: bool[M], values that may be recomputed.
        outside: bytes always on the device outside the graph.
        host_limit: most bytes that the host holds.
        calls: seconds of the program itself for copies.
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
        calls: Calls = Calls(),  # noqa: B008  # frozen
    ) -> None:
        self._host_limit, self._calls = host_limit, calls
        self._graph, self._link, self._movable, self._outside = graph, link, movable, outside
        self._cuts = Cuts(graph, repeatable)
        self._steps: dict[Set, Quick | None] = {}
        self._place = _places(graph, self._cuts.saved)
        self._crossings: dict[int, NDArray[np.bool_]] = {}

    def sets(self, limit: int, most: int) -> list[Set]:
        """Return the most promising sets at a limit, best first."""
        found: dict[Set, tuple[float, int]] = {}
        prices: dict[Set, NDArray[np.float64]] = {}
        plain = float(self._graph.seconds.sum())
        budget = max(min(_MOST_TRIES, _WORK // max(len(self._graph), 1)), _LEAST_TRIES)

        def look(price: NDArray[np.float64]) -> bool:
            """Evaluate the set at these prices; return false if known, or too slow even without waiting."""
            chosen, seconds = self._cuts.at(price)
            if chosen in found or plain + seconds > min(found.values(), default=(np.inf, 0))[0]:
                return False
            found[chosen] = self._cost(chosen, limit)
            prices[chosen] = price
            return True

        look(np.zeros(len(self._graph.size)))
        first, random, misses = self._first(), np.random.default_rng(0), 0
        while len(found) < budget and misses < 2 * budget and min(found.values())[0] > plain:
            price = next(first, None)
            if price is None:
                ranked = sorted(found, key=lambda one: (found[one], one))
                price = self._near(prices[ranked[min(int(random.exponential(1.5)), len(ranked) - 1)]], random)
            misses += not look(price)
        ranked = sorted(found, key=lambda one: (found[one], one))
        return [one for one in ranked if np.isfinite(found[one][0])][:most]

    def least(self) -> tuple[int, int, Set]:
        """Return the least reachable bytes, the operation that needs them, and the recomputed values.

        If all saved values may move, no recompute is needed; else all sets at the initial prices are tried.
        """
        self._cost((), 0)
        if (self._cuts.saved & ~self._movable & (self._graph.size > 0)).any():
            prices = itertools.islice(self._first(), None if len(self._graph) <= _MANY else _LEVELS)
            for price in prices:
                self._cost(self._cuts.at(price)[0], 0)
        known = [(q.floor_bytes, len(chosen), chosen) for chosen, q in self._steps.items() if q is not None]
        least, _, chosen = min(known)
        quick = self._steps[chosen]
        assert quick is not None
        return least, int(self._plan(chosen).runs[quick.floor_op]) % len(self._graph), chosen

    def _plan(self, chosen: Set) -> Planned:
        return planned(self._graph, self._movable, recomputed=chosen, outside=self._outside)

    def _cost(self, chosen: Set, limit: int) -> tuple[float, int]:
        """Return the seconds, infinite if the limit is not held, and the recomputed bytes."""
        if chosen not in self._steps:
            self._steps[chosen] = self._quick(chosen)
        quick = self._steps[chosen]
        seconds = float("inf") if quick is None else quick.seconds(limit)
        return seconds, int(self._graph.size[list(chosen)].sum())

    def _quick(self, chosen: Set) -> Quick | None:
        try:
            return Quick(self._plan(chosen).step, self._link, self._host_limit, self._calls)
        except PlanError:  # for example, a control edge forbids the recompute
            return None

    def _first(self) -> Iterator[NDArray[np.float64]]:
        """Yield uniform prices per byte, then prices that make values crossing some segments' borders free.

        If copies cost time of the program, also yield uniform prices capped at the cost of moving each value.
        """
        levels, size = self._levels(), self._graph.size.astype(np.float64)
        for level in levels:
            yield level * size
        if self._calls != Calls():
            moved = np.where(self._movable, 2 * self._calls.of(self._graph.size), np.inf)
            for level in levels:
                yield np.minimum(level * size, moved)
        for count in _SEGMENTS:
            for level in (levels[-1], levels[len(levels) // 2]):
                yield np.where(self._crossing(count), 0.0, level * self._graph.size)

    def _levels(self) -> list[float]:
        """Return prices in seconds a byte between those of the cheapest and the dearest operations."""
        g = self._graph
        made = (g.producer >= 0) & (g.size > 0)
        made[made] = ~g.backward[g.producer[made]]
        rates = g.seconds[g.producer[made]] / g.size[made]
        rates = rates[rates > 0]
        if not len(rates):
            return [1.0]
        marks = np.quantile(rates, np.linspace(0.0, 1.0, _LEVELS))
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

    def _near(self, price: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.float64]:
        """Return varied prices: free or dear in a section of the forward pass, or randomly changed."""
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
        levels = np.array([0.0, *self._levels()])
        if kind == 3:
            return np.where(inside, random.choice(levels) * g.size, price)
        if kind == 4:
            some = inside & (random.random(len(g.size)) < 0.3)
            return np.where(some, random.choice([0.0, 1.0]) * random.choice(levels) * g.size, price)
        few = random.choice([3 / max(len(g.size), 1), 0.1, 0.3])
        some = random.random(len(g.size)) < few
        return np.where(some, random.choice(levels, len(g.size)) * g.size, price)


def _places(graph: Graph, saved: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return each memory's place in the forward pass: the share of saved bytes made before, float64[M]."""
    order = np.argsort(graph.producer, kind="stable")
    bytes_before = np.cumsum(np.where(saved, graph.size, 0)[order])
    place = np.empty(len(graph.size))
    place[order] = bytes_before / max(int(bytes_before[-1]), 1) if len(order) else 0.0
    return place


def _borders(graph: Graph, count: int) -> NDArray[np.int64]:
    """Return the first operations of segments of about equal bytes, each at a place where few bytes cross."""
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
    """Return the bytes made before each operation and read in the forward pass from there on, int64[N]."""
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

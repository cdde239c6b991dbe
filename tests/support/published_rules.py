"""Rules, simulator and tuner of Le et al. (ISMM 2019), a baseline for decisions about graphs.

The rules count in levels, the simulator knows bytes and no time, and the tuner bisects the rules' settings.
Not here: synchronisation modes, the sequential strategy, and the rules of the paper's first version.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from solvers.rewriting import Rewriting
from solvers.rewriting.distance_rule import edges_of, levels_of, offloads_by_group

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from solvers.rewriting import Graph
    from solvers.rewriting.distance_rule import Levels

#: Share of the limit without trainable variables; the rest is for unmodelled memory.
USABLE = 0.9


@dataclass(frozen=True)
class Rules:
    """Settings, all in levels.

    Attributes:
        threshold: edges longer than this are cut.
        ahead: a reload may begin after an operation that is so many levels and one before the reader.
        group: readers at most so many levels apart share a reload; 0: each has a separate one.
    """

    threshold: int = 1
    ahead: int = 1
    group: int = 0


@dataclass(frozen=True)
class Simulated:
    """Most bytes on the device, without trainable variables, and in host memory."""

    peak_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Tuned:
    """Result of the tuner.

    Attributes:
        rules: the settings; None if the graph fits without offloads, or if no settings pass.
        rewriting: the decisions of these rules.
        simulated: their simulation; without rules, of the last trial.
        fits: true if this simulation is within the budget.
        simulations: number of simulations, O(log levels).
    """

    rules: Rules | None
    rewriting: Rewriting
    simulated: Simulated
    fits: bool
    simulations: int


def budget_of(graph: Graph, limit: int, outside_bytes: int = 0) -> float:
    """Return the simulator's budget in bytes under a limit, without lasting inputs and outside memory."""
    lasting = (graph.producer < 0) & graph.lasting
    return (limit - int(graph.size[lasting].sum()) - outside_bytes) * USABLE


@dataclass(frozen=True, eq=False)
class _Reloads:
    """Reloads of some edges: the rows of the readers, the reload of each, and each one's first row."""

    rows: NDArray[np.int64]
    reload: NDArray[np.int64]
    first: NDArray[np.int64]
    trigger: NDArray[np.int64]


@dataclass
class RuleSimulator:
    """The rules applied to one graph, and their simulation; counts the simulations."""

    graph: Graph
    simulations: int = 0
    known: dict[Rules, Simulated] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.levels = levels_of(self.graph)
        self.edges = edges_of(self.graph, self.levels)
        self.order = np.argsort(self.levels.level, kind="stable")
        self.jumps = _jumps(self.levels)
        self.others = self._last_other_producers()

    def rewriting(self, rules: Rules) -> Rewriting:
        """Return the decisions of the rules."""
        r = self._reloads(rules)
        starts = np.flatnonzero(np.diff(r.reload, prepend=-1))
        return offloads_by_group(self.graph, self.levels, self.edges, r.rows, starts, r.trigger)

    def _reloads(self, rules: Rules) -> _Reloads:
        edges, level = self.edges, self.levels.level
        rows = np.flatnonzero(edges.possible & (edges.distance > rules.threshold))
        memory, of_row = edges.memory[rows], edges.level[rows]
        new = (memory[1:] != memory[:-1]) | (np.diff(of_row) > rules.group) | (rules.group <= 0)
        reload = np.concatenate([[0], np.cumsum(new)])[: len(rows)]
        starts = np.flatnonzero(np.diff(reload, prepend=-1))
        first = rows[starts]
        at, producer = edges.level[first] - rules.ahead - 1, self.graph.producer[edges.memory[first]]
        trigger = self._before(edges.reader[first], at)
        trigger = np.where((at > level[producer]) & (trigger > producer), trigger, -1)
        if len(starts):  # in graph order, a reader may precede one of a lower level
            trigger[trigger >= np.minimum.reduceat(edges.reader[rows], starts)] = -1
        return _Reloads(rows, reload, first, trigger)

    def _before(self, operation: NDArray[np.int64], level: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each operation a predecessor at a level on its longest path, -1 if none."""
        result = operation.copy()
        for jump in reversed(self.jumps):
            there = np.where(result < 0, -1, jump[result])
            far = (there >= 0) & (self.levels.level[there] >= level)
            result[far] = there[far]
        return np.where((result >= 0) & (self.levels.level[result] == level), result, -1)

    def simulate(self, rules: Rules) -> Simulated:
        """Simulate levels in order, the operations of a level one at a time, without time and workspaces.

        Outputs are allocated before their operation. Afterwards, memory without further readers is freed;
        memory being offloaded stays for one operation more, whatever the size; then the triggered reloads
        begin. A reload without a trigger waits for all other inputs of the first reader.
        """
        self.simulations += 1
        graph, edges, r = self.graph, self.edges, self._reloads(rules)
        n, m, steps = len(graph), len(graph.size), 2 * len(graph) + 4
        place = np.empty(n + 1, np.int64)  # the last entry is for index -1: before all
        place[self.order], place[n] = np.arange(n), -1
        reload, when = self._reload_of_reads(r), place[graph.reader]
        size = np.where(graph.host, 0, graph.size)
        made, gone = place[graph.producer], place[graph.producer]
        kept = reload < 0
        np.maximum.at(gone, graph.base[graph.reads[kept]], when[kept])
        values = edges.memory[r.first]
        leaves, lasting = np.zeros(m, np.int64), np.zeros(m, np.bool_)
        leaves[values] = 1
        lasting[graph.base[graph.lasting]] = True
        own = np.flatnonzero((graph.base == np.arange(m)) & ~(lasting & (graph.producer < 0)))
        load = _Load(steps)
        load.add(2 * made[own] + 2, size[own])
        load.add(np.where(lasting, steps - 1, 2 * (gone + leaves) + 3)[own], -size[own])
        starts = self._starts(place, r, made[values])
        ends = starts.copy()
        np.maximum.at(ends, reload[~kept], 2 * when[~kept] + 3)
        load.add(starts, size[values])
        load.add(ends, -size[values])
        last = np.zeros(m, np.int64)
        np.maximum.at(last, values, starts)
        away, host = np.flatnonzero(leaves), _Load(steps)
        host.add(2 * made[away] + 3, size[away])
        host.add(last[away] + 1, -size[away])
        self.known[rules] = Simulated(load.peak(), host.peak())
        return self.known[rules]

    def _reload_of_reads(self, r: _Reloads) -> NDArray[np.int64]:
        """Return the reload that each read uses, directly or through a view; -1: the value's own memory."""
        edges = self.edges
        own = np.full(len(edges.memory) + 1, -1)  # the last entry is for index -1: no edge
        own[r.rows] = r.reload
        of_value, value = own[edges.view_row], edges.view_source
        while (value >= 0).any():
            of_value = np.where((of_value < 0) & (value >= 0), own[edges.view_row[value]], of_value)
            value = np.where(value < 0, -1, edges.view_source[value])
        read = own[edges.of_read]
        return np.where(read >= 0, read, of_value[self.graph.reads])

    def _starts(self, place: NDArray[np.int64], r: _Reloads, made: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the half step at which each reload takes memory."""
        others = self.others[r.first]
        waits = np.where(others < 0, place[self.edges.reader[r.first]] - 1, place[others])
        begins = np.where(r.trigger < 0, waits, place[r.trigger])
        result: NDArray[np.int64] = 2 * np.maximum(begins, made) + 3
        return result

    def _last_other_producers(self) -> NDArray[np.int64]:
        """Return for each edge the last producer, by level, of the reader's other inputs, -1 for none."""
        graph, edges = self.graph, self.edges
        result = np.full(len(edges.memory), -1)
        place = np.empty(len(graph), np.int64)
        place[self.order] = np.arange(len(graph))
        for row, (memory, reader) in enumerate(
            zip(edges.memory.tolist(), edges.reader.tolist(), strict=True)
        ):
            read = graph.read_by(reader)
            producers = graph.producer[read[graph.base[read] != memory]]
            producers = producers[producers >= 0]
            if len(producers):
                result[row] = producers[place[producers].argmax()]
        return result


class _Load:
    """Bytes over half steps: operations allocate at even ones, frees and reloads happen at odd ones."""

    def __init__(self, steps: int) -> None:
        self.change = np.zeros(steps + 1, np.int64)

    def add(self, when: NDArray[np.int64], size: NDArray[np.int64]) -> None:
        np.add.at(self.change, np.minimum(when, len(self.change) - 1), size)

    def peak(self) -> int:
        return int(np.cumsum(self.change).max(initial=0))


def _jumps(levels: Levels) -> list[NDArray[np.int64]]:
    """Return for each power of two the predecessor so many levels before each operation."""
    jumps = [levels.longest]
    while (jumps[-1] >= 0).any():
        jumps.append(np.where(jumps[-1] < 0, -1, jumps[-1][jumps[-1]]))
    return jumps


def tune(graph: Graph, budget: float) -> Tuned:
    """Run the published tuner: fewest passing offloads, then earliest reloads, then most shared.

    Args:
        graph: the graph that is to fit.
        budget: bytes for the simulator: `budget_of` a limit.
    """
    simulator = RuleSimulator(graph)
    most = max(int(simulator.levels.level.max(initial=-1)) + 1, 1)

    def passes(rules: Rules) -> bool:
        return simulator.simulate(rules).peak_bytes < budget

    rules = Rules()
    for trial, fits in ((Rules(most), True), (rules, False)):
        if passes(trial) == fits:
            return Tuned(None, Rewriting(), simulator.known[trial], fits, simulator.simulations)
    rules = replace(rules, threshold=_largest(lambda t: passes(replace(rules, threshold=t)), most))
    rules = replace(rules, ahead=_largest(lambda a: passes(replace(rules, ahead=a)), most))
    rules = replace(rules, group=_some_group(lambda g: passes(replace(rules, group=g)), most))
    rewriting = simulator.rewriting(rules)
    return Tuned(rules, rewriting, simulator.known[rules], fits=True, simulations=simulator.simulations)


def _largest(passes: Callable[[int], bool], most: int) -> int:
    """Bisect for the largest passing number from 1, known to pass, to ``most``; passing is monotone."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if passes(middle) else (low, middle - 1)
    return low


def _some_group(passes: Callable[[int], bool], most: int) -> int:
    """Return ``most`` if passing, else the first passing number of a bisection, else 0, known to pass."""
    if passes(most):
        return most
    low, high = 1, most - 1
    while low <= high:
        middle = (low + high) // 2
        if passes(middle):
            return middle
        high = middle - 1
    return 0

"""Simulator and tuner of Le et al. (ISMM 2019): memory level by level, settings by bisection."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from solvers.rewriting.levels import Levels, levels_of
from solvers.rewriting.rewriting import Rewriting, Sync
from solvers.rewriting.rules import Copies, Rules, candidates, copies, rewriting_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from solvers.rewriting.edges import Edges
    from solvers.rewriting.graph import Graph

USABLE = 0.9  # share of the limit without trainable variables; the rest is for unmodelled memory


@dataclass(frozen=True)
class Simulated:
    """Most bytes on the device, without trainable variables, and in host memory."""

    peak_bytes: int
    host_bytes: int


def budget_of(graph: Graph, limit: int, beside_bytes: int = 0) -> float:
    """Return the simulator's budget in bytes under a limit, without lasting inputs and outside memory."""
    lasting = (graph.producer < 0) & graph.lasting
    return (limit - int(graph.size[lasting].sum()) - beside_bytes) * USABLE


def simulate(graph: Graph, levels: Levels, edges: Edges, swapped: Copies, sync: Sync) -> Simulated:
    """Simulate levels in order, operations of a level one at a time, without time, bandwidth or workspaces.

    Outputs of an operation are allocated before the operation. Afterwards, memory without further readers is
    freed; memory being swapped out stays for one operation more, whatever the size; then the triggered copies
    begin. A copy without a trigger, and with `Sync.IN` every copy, waits for all other inputs of the first
    reader.
    """
    n, steps = len(graph), 2 * len(graph) + 4
    place = np.empty(n + 1, np.int64)  # the last entry is for index -1: before all
    place[levels.order()], place[n] = np.arange(n), -1
    copy, memory, when = _resolved(graph, edges, swapped), graph.base[graph.reads], place[graph.reader]
    m = len(graph.size)
    size = np.where(graph.host, 0, graph.size)
    made, gone = place[graph.producer], place[graph.producer]
    kept = copy < 0
    np.maximum.at(gone, memory[kept], when[kept])
    leaves = np.zeros(m, np.int64)
    leaves[edges.memory[swapped.first]] = 1
    lasts = np.zeros(m, np.bool_)
    lasts[graph.base[graph.lasting]] = True
    of = np.flatnonzero((graph.base == np.arange(m)) & ~(lasts & (graph.producer < 0)))
    load = _Load(steps)
    load.add(2 * made[of] + 2, size[of])
    load.add(np.where(lasts, steps - 1, 2 * (gone + leaves) + 3)[of], -size[of])
    values = edges.memory[swapped.first]
    starts = _starts(place, edges, swapped, sync, made[values])
    ends = starts.copy()
    np.maximum.at(ends, copy[~kept], 2 * when[~kept] + 3)
    load.add(starts, size[values])
    load.add(ends, -size[values])
    last = np.zeros(m, np.int64)
    np.maximum.at(last, values, starts)
    away, host = np.flatnonzero(leaves), _Load(steps)
    host.add(2 * made[away] + 3, size[away])
    host.add(last[away] + 1, -size[away])
    return Simulated(load.peak(), host.peak())


class _Load:
    """Bytes over half steps: operations allocate at even ones, frees and copies back happen at odd ones."""

    def __init__(self, steps: int) -> None:
        self.change = np.zeros(steps + 1, np.int64)

    def add(self, when: NDArray[np.int64], size: NDArray[np.int64]) -> None:
        np.add.at(self.change, np.minimum(when, len(self.change) - 1), size)

    def peak(self) -> int:
        return int(np.cumsum(self.change).max(initial=0))


def _resolved(graph: Graph, edges: Edges, swapped: Copies) -> NDArray[np.int64]:
    """Return the copy that each read uses, directly or through a view; -1: the value's own memory."""
    own = np.full(len(edges) + 1, -1)  # the last entry is for index -1: no edge
    own[swapped.edge] = swapped.copy
    of_value = own[edges.made_by]
    value = edges.made_from
    while (value >= 0).any():
        of_value = np.where((of_value < 0) & (value >= 0), own[edges.made_by[value]], of_value)
        value = np.where(value < 0, -1, edges.made_from[value])
    read = own[edges.of_read]
    return np.where(read >= 0, read, of_value[graph.reads])


def _starts(
    place: NDArray[np.int64], edges: Edges, swapped: Copies, sync: Sync, made: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the half step at which each copy takes memory."""
    first = swapped.first
    others = edges.others[first]
    waits = np.where(others < 0, place[edges.reader[first]] - 1, place[others])
    begins = np.where(swapped.trigger < 0, waits, place[swapped.trigger])
    if sync & Sync.IN:
        begins = np.maximum(begins, waits)
    return 2 * np.maximum(begins, made) + 3


@dataclass(frozen=True)
class Tuned:
    """Result of the published tuner.

    Attributes:
        rules: the settings; `None` if the graph fits without swaps, or if no settings pass.
        rewriting: the decisions of these rules.
        simulated: the simulation of these rules; without rules, of the unchanged graph or of the last trial.
        fits: true if this simulation is within the budget.
        simulations: number of simulations, O(log levels).
    """

    rules: Rules | None
    rewriting: Rewriting
    simulated: Simulated
    fits: bool
    simulations: int


@dataclass
class _Play:
    """Simulator for one graph and budget that counts calls."""

    graph: Graph
    levels: Levels
    edges: Edges
    budget: float
    count: int = 0
    seen: dict[Rules, Simulated] = field(default_factory=dict)

    def __call__(self, rules: Rules) -> bool:
        self.count += 1
        chosen = copies(self.graph, self.levels, self.edges, rules)
        self.seen[rules] = simulate(self.graph, self.levels, self.edges, chosen, rules.sync)
        return self.seen[rules].peak_bytes < self.budget

    def tuned(self, rules: Rules | None, shown: Rules, *, fits: bool) -> Tuned:
        decided = Rewriting()
        if rules is not None:
            chosen = copies(self.graph, self.levels, self.edges, rules)
            decided = rewriting_of(self.edges, chosen, rules.sync)
        return Tuned(rules, decided, self.seen[shown], fits, self.count)


def tune(
    graph: Graph,
    budget: float,
    *,
    sync: Sync = Sync.NONE,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    levels: Levels | None = None,
) -> Tuned:
    """Run the published tuner: fewest passing swaps, then earliest copies back, then most shared.

    Args:
        graph: the graph that is to fit.
        budget: bytes for the simulator: `budget_of` a limit.
        sync: the first synchronisation mode to try.
        include: kinds and modules to which swaps are restricted, as patterns.
        exclude: kinds and modules which are not swapped.
        levels: levels of the graph, if known.
    """
    levels = levels_of(graph) if levels is None else levels
    n = max(len(levels), 1)
    play = _Play(graph, levels, candidates(graph, levels, include, exclude), budget)
    plain = Rules(n, 1, 0, sync)
    if play(plain):
        return play.tuned(None, plain, fits=True)
    modes = [Sync(mode) for mode in range(int(sync), 4)]
    found = next((mode for mode in modes if play(Rules(1, 1, 0, mode))), None)
    if found is None:
        return play.tuned(None, Rules(1, 1, 0, modes[-1]), fits=False)
    rules = Rules(1, 1, 0, found)
    rules = replace(rules, threshold=_largest(lambda t: play(replace(rules, threshold=t)), n))
    if not found & Sync.IN:
        rules = replace(rules, ahead=_largest(lambda h: play(replace(rules, ahead=h)), n))
        rules = replace(rules, groupby=_some_group(lambda g: play(replace(rules, groupby=g)), n))
    return play.tuned(rules, rules, fits=True)


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

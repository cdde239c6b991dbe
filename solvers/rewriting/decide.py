"""Choice of the values to offload and to recompute, so that a graph holds a limit."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from solvers.errors import PlanError
from solvers.rewriting.apply import apply_rewriting
from solvers.rewriting.copy_overhead import CopyOverhead
from solvers.rewriting.judge import simulate
from solvers.rewriting.recompute_search import RecomputeSearch
from solvers.rewriting.records import DEFAULTS, Decision, Rewriting
from solvers.rewriting.refinement import offload_early
from solvers.rewriting.step_conversion import GraphStep, graph_step, offloadable
from solvers.swap.absences import absences_of
from solvers.swap.planner import OffloadPlanner
from solvers.swap.schedule import Schedule
from solvers.swap.tunables import DEFAULTS as OFFLOADS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from solvers.rewriting.graph import Graph
    from solvers.rewriting.records import Simulation
    from solvers.swap.link import Link

#: Tunables without a price of moves, since synchronous copies take time in the graph (`CopyOverhead`).
_TUNABLES = replace(OFFLOADS, move_bytes=0)


class Decider:
    """Decides about one graph for any limits.

    Decisions for lower limits are remembered, and considered for higher limits.

    Args:
        graph: the captured graph.
        link: the copy times.
        outside_bytes: bytes always on the device outside the graph, such as the optimizer's state.
        host_limit: most bytes that the host holds at one time.
        repeatable: bool[M], values that may be recomputed; by default all possible values.
        overhead: seconds of the program itself for each copy, which no overlap can hide.
    """

    def __init__(
        self,
        graph: Graph,
        link: Link,
        *,
        outside_bytes: int = 0,
        host_limit: int | None = None,
        repeatable: NDArray[np.bool_] | None = None,
        overhead: CopyOverhead = CopyOverhead(),  # noqa: B008  # frozen
    ) -> None:
        self.overhead = overhead
        self.graph, self.link, self.host_limit, self.outside_bytes = graph, link, host_limit, outside_bytes
        self._movable = offloadable(graph)
        self._repeatable = np.ones(len(graph.size), np.bool_) if repeatable is None else repeatable
        self.unchanged = self._simulate(Rewriting())
        self._known: list[Decision] = []

    @cached_property
    def _search(self) -> RecomputeSearch:
        return RecomputeSearch(
            self.graph,
            self.link,
            self._movable,
            self._repeatable,
            outside=self.outside_bytes,
            host_limit=self.host_limit,
            overhead=self.overhead,
        )

    def least(self) -> tuple[int, int]:
        """Return `least_bytes` of this graph."""
        if not len(self.graph):
            return 0, -1
        return self._search.least()[:2]

    def decide(self, limit_bytes: int) -> Decision:
        """Return the shortest step found within a limit, see the function `decide`."""
        if self.unchanged.peak_bytes <= limit_bytes:
            return Decision(limit_bytes, Rewriting(), "nothing", self.unchanged)
        fits: list[Decision] = []
        for target in self._limits(limit_bytes):
            self._known += self._decisions(target)
            fits = [made for made in self._known if self._holds(made, limit_bytes)]
            if fits:
                break
        else:
            least = self.least()[0]
            raise PlanError(self._refusal(limit_bytes), least if limit_bytes < least else None)
        best = min(fits, key=lambda made: made.cost)
        return Decision(limit_bytes, best.rewriting, best.method, best.simulation)

    def _limits(self, limit: int) -> Iterator[int]:
        """Yield the limits to search: a small host may permit only schedules of lower limits."""
        yield limit
        more = limit - self.least()[0]
        if self.host_limit is not None and more > 0:
            yield from (
                limit - step * more // DEFAULTS.lower_limits for step in range(1, DEFAULTS.lower_limits + 1)
            )

    def offload_everything(self) -> Decision:
        """Return the decision to offload every movable value while unused, without recompute.

        The decision ignores the cost in time.

        Raises:
            PlanError: the host is too small.
        """
        converted = graph_step(self.graph, self._movable, recomputed=(), outside=self.outside_bytes)
        rewriting = Rewriting(converted.offloads(_full_absences(converted)))
        made = Decision(0, rewriting, "everything", self._simulate(rewriting))
        if self.host_limit is not None and made.host_bytes > self.host_limit:
            raise PlanError(f"all that may move needs {made.host_bytes} bytes on the host")
        return made

    def curve(self, limits: list[int]) -> list[Decision]:
        """Return a decision for each limit, in the order of the limits; higher limits are never slower."""
        found = {limit: self.decide(limit) for limit in sorted(set(limits))}
        return [found[limit] for limit in limits]

    def _decisions(self, limit: int) -> list[Decision]:
        """Return decisions that may hold a limit, with a longer search of offloads for the best set."""
        least, _, smallest = self._search.least()
        if limit < least:
            return []
        few = len(self.graph) <= DEFAULTS.many_operations
        sets = self._search.sets(limit, DEFAULTS.scheduled_sets if few else 1)
        made = {
            chosen: self._plan_offloads(chosen, limit, tries=0)
            for chosen in dict.fromkeys([*sets, ()] if few else sets)
        }
        fits = [
            (candidate.cost, chosen) for chosen, candidate in made.items() if self._holds(candidate, limit)
        ]
        if not fits:
            return [self._plan_offloads(smallest, limit, tries=None)]
        (seconds, _), best = min(fits)
        found = list(made.values())
        if seconds > self.unchanged.seconds:
            found += [self._plan_offloads(best, limit, tries=None)] if few else []
        return found

    def _plan_offloads(self, chosen: tuple[int, ...], limit: int, *, tries: int | None) -> Decision:
        """Return the decision to recompute ``chosen``, with offloads that hold the limit if possible."""
        converted = graph_step(self.graph, self._movable, recomputed=chosen, outside=self.outside_bytes)
        new_planner = partial(
            OffloadPlanner, converted.step, self.link, host_limit=self.host_limit, tunables=_TUNABLES
        )
        planner = new_planner(tries=tries)
        if planner.floor()[0] > limit:  # count small buffers, too
            planner = new_planner(tries=0, least_bytes=1)
        try:
            held = planner.hold(limit)
            schedule, method = held.schedule, held.method
        except PlanError:
            schedule, method = _full_absences(converted), "everything"
        rewriting = Rewriting(converted.offloads(schedule), chosen)
        method = f"{method}, {len(chosen)} recomputed" if chosen else method
        made = Decision(limit, rewriting, method, self._simulate(rewriting))
        return self._with_early_offloads(made) if made.stall_seconds > 0 else made

    def _with_early_offloads(self, made: Decision) -> Decision:
        """Begin copies out while the values are still read, unless that is slower or needs more memory."""
        rewriting = offload_early(self.graph, made.rewriting, self.link)
        early = Decision(
            made.limit_bytes, rewriting, f"{made.method}, offloaded early", self._simulate(rewriting)
        )
        worse = early.cost >= made.cost or not self._holds(early, max(made.limit_bytes, made.peak_bytes))
        return made if worse else early

    def _holds(self, made: Decision, limit: int) -> bool:
        within = self.host_limit is None or made.host_bytes <= self.host_limit
        return within and made.peak_bytes <= limit

    def _simulate(self, rewriting: Rewriting) -> Simulation:
        rewritten = self.overhead.applied_to(apply_rewriting(self.graph, rewriting))
        return simulate(rewritten, self.link, outside_bytes=self.outside_bytes)

    def _refusal(self, limit: int) -> str:
        g = self.graph
        least, op = self.least()
        if limit >= least and self.host_limit is None:
            return f"no step found that fits in {limit} bytes, though {least} should be enough"
        if limit >= least:
            free = Decider(
                g,
                self.link,
                outside_bytes=self.outside_bytes,
                repeatable=self._repeatable,
                overhead=self.overhead,
            )
            return (
                f"no step found that fits in {limit} bytes with {self.host_limit} bytes on the host; "
                f"with {free.decide(limit).host_bytes} on the host, or fewer, one does"
            )
        kind = f" ({g.kinds[g.kind[op]]})" if 0 <= g.kind[op] < len(g.kinds) else ""
        touched = np.unique(g.base[[*g.read_by(op).tolist(), *np.flatnonzero(g.producer == op).tolist()]])
        own = int(g.size[touched].sum() + g.workspace[op])
        needs = f"operation {g.names[op]}{kind} needs {least}: {own} that it touches"
        return f"no step fits in {limit} bytes: {needs}, {least - own} that stay"


def _full_absences(converted: GraphStep) -> Schedule:
    """Return the schedule in which every buffer is away while unused."""
    a = absences_of(converted.step)
    order = np.argsort(a.use, kind="stable")
    a = a.select(order)
    sources = np.zeros(len(a), np.bool_)
    seen = set[int]()
    for row in np.argsort(a.last, kind="stable").tolist():
        sources[row] = int(a.buffer[row]) not in seen
        seen.add(int(a.buffer[row]))
    return Schedule(a.buffer, a.last, a.last, a.last + 1, a.use, a.use, sources)

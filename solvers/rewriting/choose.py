"""Choice of the values to offload and to recompute, so that a graph holds a limit."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from solvers.errors import PlanError
from solvers.rewriting.copy_calls import Calls
from solvers.rewriting.decision import Decision
from solvers.rewriting.early_offload import copied_early
from solvers.rewriting.judge import simulate
from solvers.rewriting.published import budget_of, tune
from solvers.rewriting.release_times import released
from solvers.rewriting.rewrite import rewrite
from solvers.rewriting.rewriting import Rewriting
from solvers.rewriting.search import Search
from solvers.rewriting.step_conversion import Planned, candidates, planned
from solvers.swap.absences import absences_of
from solvers.swap.planner import OffloadPlanner
from solvers.swap.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from solvers.rewriting.graph import Graph
    from solvers.rewriting.judge import Timed
    from solvers.swap.link import Link

#: Number of the found sets of recomputed values for which the swap planner makes a complete plan.
_CLOSER = 3
#: Number of lower limits to try if the host is too small for a schedule of the limit.
_LOWER = 8
#: In graphs of more operations, only the best set is planned.
_MANY = 4000


def decide(
    graph: Graph,
    limit_bytes: int,
    link: Link,
    *,
    outside_bytes: int = 0,
    host_limit: int | None = None,
    movable: NDArray[np.bool_] | None = None,
    repeatable: NDArray[np.bool_] | None = None,
) -> Decision:
    """Return the shortest step found whose peak is within a limit.

    Args:
        graph: the captured graph.
        limit_bytes: limit of the device.
        link: the copy times.
        outside_bytes: bytes always on the device outside the graph, such as the optimizer's state.
        host_limit: most bytes that the host holds at one time.
        movable: bool[M], values that may be offloaded; by default all that can be.
        repeatable: bool[M], values that may be recomputed; by default all that can be.

    Raises:
        PlanError: no solution was found; names the least feasible limit and the operation that needs this
            limit.
    """
    return Chooser(
        graph,
        link,
        outside_bytes=outside_bytes,
        host_limit=host_limit,
        movable=movable,
        repeatable=repeatable,
    ).decide(limit_bytes)


def least_bytes(
    graph: Graph,
    link: Link,
    *,
    outside_bytes: int = 0,
    movable: NDArray[np.bool_] | None = None,
    repeatable: NDArray[np.bool_] | None = None,
) -> tuple[int, int]:
    """Return the least limit that can be held at any cost in time, and the limiting operation."""
    chooser = Chooser(graph, link, outside_bytes=outside_bytes, movable=movable, repeatable=repeatable)
    return chooser.least()


class Chooser:
    """Decides about one graph for any limits; arguments as of `decide`.

    ``calls`` gives the seconds of the program itself for each copy, which no overlap can hide.
    Decisions for a lower limit are remembered and considered for higher ones.
    """

    def __init__(
        self,
        graph: Graph,
        link: Link,
        *,
        outside_bytes: int = 0,
        host_limit: int | None = None,
        movable: NDArray[np.bool_] | None = None,
        repeatable: NDArray[np.bool_] | None = None,
        calls: Calls = Calls(),  # noqa: B008  # frozen
    ) -> None:
        self.calls = calls
        self.graph, self.link, self.host_limit, self.outside_bytes = graph, link, host_limit, outside_bytes
        self._movable = candidates(graph) if movable is None else candidates(graph) & movable
        self._repeatable = np.ones(len(graph.size), np.bool_) if repeatable is None else repeatable
        self._plain = self._timed(Rewriting())
        self._known: list[Decision] = []

    @cached_property
    def _search(self) -> Search:
        return Search(
            self.graph,
            self.link,
            self._movable,
            self._repeatable,
            outside=self.outside_bytes,
            host_limit=self.host_limit,
            calls=self.calls,
        )

    def least(self) -> tuple[int, int]:
        """Return `least_bytes` of this graph."""
        if not len(self.graph):
            return 0, -1
        return self._search.least()[:2]

    def decide(self, limit_bytes: int) -> Decision:
        """Return the shortest step found within a limit, see the function `decide`."""
        if self._plain.peak_bytes <= limit_bytes:
            return self._decision(limit_bytes, Rewriting(), "nothing", self._plain)
        fits: list[Decision] = []
        for asked in self._asked(limit_bytes):
            self._known += self._made(asked)
            fits = [one for one in self._known if self._holds(one, limit_bytes)]
            if fits:
                break
        else:
            least = self.least()[0]
            raise PlanError(self._refusal(limit_bytes), least if limit_bytes < least else None)
        best = min(fits, key=lambda one: one.cost)
        return self._decision(limit_bytes, best.rewriting, best.how, best.timed)

    def _asked(self, limit: int) -> Iterator[int]:
        """Yield the limits to search: if the host is small, only a schedule of a lower limit may fit."""
        yield limit
        more = limit - self.least()[0]
        if self.host_limit is not None and more > 0:
            yield from (limit - step * more // _LOWER for step in range(1, _LOWER + 1))

    def everything(self) -> Decision:
        """Return the decision to offload every movable value while unused, without recompute.

        The cost in time is ignored.

        Raises:
            PlanError: the host is too small.
        """
        plan = planned(self.graph, self._movable, recomputed=(), outside=self.outside_bytes)
        rewriting = Rewriting(plan.swaps(_everything(plan)))
        made = self._decision(0, rewriting, "everything", self._timed(rewriting))
        if self.host_limit is not None and made.host_bytes > self.host_limit:
            raise PlanError(f"all that may move needs {made.host_bytes} bytes on the host")
        return made

    def curve(self, limits: list[int]) -> list[Decision]:
        """Return a decision for each limit, in the order of the limits; a higher limit is never slower."""
        found = {limit: self.decide(limit) for limit in sorted(set(limits))}
        return [found[limit] for limit in limits]

    def _made(self, limit: int) -> list[Decision]:
        """Return decisions that may hold a limit; the best set is planned with a longer search for swaps."""
        least, _, smallest = self._search.least()
        if limit < least:
            return []
        few = len(self.graph) <= _MANY
        sets = self._search.sets(limit, _CLOSER if few else 1)
        made = {
            chosen: self._planned(chosen, limit, tries=0)
            for chosen in dict.fromkeys([*sets, ()] if few else sets)
        }
        fits = [(one.cost, chosen) for chosen, one in made.items() if self._holds(one, limit)]
        if not fits:
            return [self._planned(smallest, limit, tries=None)]
        (seconds, _), best = min(fits)
        found = list(made.values())
        if seconds > self._plain.seconds:
            found += self._published(limit)
            found += [self._planned(best, limit, tries=None)] if few else []
        return found

    def _planned(self, chosen: tuple[int, ...], limit: int, *, tries: int | None) -> Decision:
        """Return the decision to recompute ``chosen`` and to offload so as to hold the limit if possible."""
        plan = planned(self.graph, self._movable, recomputed=chosen, outside=self.outside_bytes)
        planner = OffloadPlanner(plan.step, self.link, host_limit=self.host_limit, tries=tries)
        if planner.floor()[0] > limit:  # count every small buffer, too
            planner = OffloadPlanner(plan.step, self.link, host_limit=self.host_limit, tries=0, least_bytes=1)
        try:
            held = planner.hold(limit)
            schedule, how = held.schedule, held.method
        except PlanError:
            schedule, how = _everything(plan), "everything"
        rewriting = Rewriting(plan.swaps(schedule), chosen)
        how = f"{how}, {len(chosen)} made again" if chosen else how
        made = self._decision(limit, rewriting, how, self._timed(rewriting))
        return self._sooner(made) if made.stall_seconds > 0 else made

    def _sooner(self, made: Decision) -> Decision:
        """Begin copies out while the values are still read, if that makes nothing worse."""
        rewriting = copied_early(self.graph, made.rewriting, self.link)
        early = self._decision(
            made.limit_bytes, rewriting, f"{made.how}, copied early", self._timed(rewriting)
        )
        worse = early.cost >= made.cost or not self._holds(early, max(made.limit_bytes, made.peak_bytes))
        return made if worse else early

    def _published(self, limit: int) -> list[Decision]:
        """Return the published tuner's decision, if feasible and limited to movable values."""
        tuned = tune(self.graph, budget_of(self.graph, limit, self.outside_bytes))
        values = [swap.value for swap in tuned.rewriting.swaps]
        if not values or not self._movable[values].all():
            return []
        rewriting = released(self.graph, tuned.rewriting, self.link, limit, outside_bytes=self.outside_bytes)
        return [self._decision(limit, rewriting, "as published", self._timed(rewriting))]

    def _holds(self, made: Decision, limit: int) -> bool:
        within = self.host_limit is None or made.host_bytes <= self.host_limit
        return within and made.peak_bytes <= limit

    def _timed(self, rewriting: Rewriting) -> Timed:
        rewritten = self.calls.within(rewrite(self.graph, rewriting))
        return simulate(rewritten, self.link, outside_bytes=self.outside_bytes)

    def _decision(self, limit: int, rewriting: Rewriting, how: str, timed: Timed) -> Decision:
        plain = self._plain
        return Decision(limit, rewriting, timed, plain.peak_bytes, plain.seconds, how)

    def _refusal(self, limit: int) -> str:
        g = self.graph
        least, op = self.least()
        if limit >= least and self.host_limit is None:
            return f"no step found that fits in {limit} bytes, though {least} should be enough"
        if limit >= least:
            free = Chooser(
                g,
                self.link,
                outside_bytes=self.outside_bytes,
                movable=self._movable,
                repeatable=self._repeatable,
                calls=self.calls,
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


def _everything(plan: Planned) -> Schedule:
    """Return the schedule in which every buffer is away while unused."""
    a = absences_of(plan.step)
    order = np.argsort(a.use, kind="stable")
    a = a.select(order)
    sources = np.zeros(len(a), np.bool_)
    seen = set[int]()
    for row in np.argsort(a.last, kind="stable").tolist():
        sources[row] = int(a.buffer[row]) not in seen
        seen.add(int(a.buffer[row]))
    return Schedule(a.buffer, a.last, a.last, a.last + 1, a.use, a.use, sources)

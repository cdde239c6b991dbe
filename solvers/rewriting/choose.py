"""Which values of a graph wait in the host's memory and which are made again, so that it holds a limit."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from solvers.errors import PlanError
from solvers.rewriting.calls import Calls
from solvers.rewriting.decision import Decision
from solvers.rewriting.early import copied_early
from solvers.rewriting.published import budget_of, tune
from solvers.rewriting.released import released
from solvers.rewriting.rewriting import Rewriting
from solvers.rewriting.rewritten import rewrite
from solvers.rewriting.search import Search
from solvers.rewriting.steps import Planned, candidates, planned
from solvers.rewriting.timed import simulate
from solvers.swap.absences import absences_of
from solvers.swap.plan import SwapPlanner
from solvers.swap.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from solvers.rewriting.graph import Graph
    from solvers.rewriting.timed import Timed
    from solvers.swap.link import Link

#: So many of the sets that a search found are planned for with all the planner of swaps can.
_CLOSER = 3
#: How many lower limits to look for where the host is too small for what holds a limit.
_LOWER = 8
#: Of more operations, only the best one.
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
    """The shortest step that we find whose peak is within a limit.

    Args:
        graph: as it was captured.
        limit_bytes: of the device.
        link: how long copies take.
        outside_bytes: on the device always beside the graph, such as the optimizer's state.
        host_limit: bytes that the host holds at most at one time.
        movable: bool[M], values that may be swapped; by default all that can be.
        repeatable: bool[M], values that may be made again; by default all that can be.

    Raises:
        PlanError: no way is found, with the least limit there is and the operation that needs it.
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
    """The least limit that we can hold, however long it takes, and the operation that needs it."""
    chooser = Chooser(graph, link, outside_bytes=outside_bytes, movable=movable, repeatable=repeatable)
    return chooser.least()


class Chooser:
    """Decides about one graph for any limits; arguments as of `decide`.

    With ``calls`` each copy takes so much of the program itself, however well it overlaps.
    What it found for a lower limit it remembers for a higher one.
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
        """See `least_bytes`."""
        if not len(self.graph):
            return 0, -1
        return self._search.least()[:2]

    def decide(self, limit_bytes: int) -> Decision:
        """See the function."""
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
        """For what to look: where a host is small, there may be room only for what holds a lower limit."""
        yield limit
        more = limit - self.least()[0]
        if self.host_limit is not None and more > 0:
            yield from (limit - step * more // _LOWER for step in range(1, _LOWER + 1))

    def everything(self) -> Decision:
        """Whatever may move is away while it is not in use, and nothing is made again, whatever that takes.

        Raises:
            PlanError: the host is too small for it.
        """
        plan = planned(self.graph, self._movable, recomputed=(), outside=self.outside_bytes)
        rewriting = Rewriting(plan.swaps(_everything(plan)))
        made = self._decision(0, rewriting, "everything", self._timed(rewriting))
        if self.host_limit is not None and made.host_bytes > self.host_limit:
            raise PlanError(f"all that may move needs {made.host_bytes} bytes on the host")
        return made

    def curve(self, limits: list[int]) -> list[Decision]:
        """A decision for each limit, in their order; a higher one is never slower."""
        found = {limit: self.decide(limit) for limit in sorted(set(limits))}
        return [found[limit] for limit in limits]

    def _made(self, limit: int) -> list[Decision]:
        """Decisions that may hold a limit; the best of them after a longer search for swaps."""
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
        """These values made again, and swaps that hold the limit if that can be."""
        plan = planned(self.graph, self._movable, recomputed=chosen, outside=self.outside_bytes)
        planner = SwapPlanner(plan.step, self.link, host_limit=self.host_limit, tries=tries)
        if planner.floor()[0] > limit:  # every little buffer counts
            planner = SwapPlanner(plan.step, self.link, host_limit=self.host_limit, tries=0, least_bytes=1)
        try:
            held = planner.hold(limit)
            schedule, how = held.schedule, held.how
        except PlanError:
            schedule, how = _everything(plan), "everything"
        rewriting = Rewriting(plan.swaps(schedule), chosen)
        how = f"{how}, {len(chosen)} made again" if chosen else how
        made = self._decision(limit, rewriting, how, self._timed(rewriting))
        return self._sooner(made) if made.stall_seconds > 0 else made

    def _sooner(self, made: Decision) -> Decision:
        """With copies out begun while they are still read, if nothing is worse for it."""
        rewriting = copied_early(self.graph, made.rewriting, self.link)
        early = self._decision(
            made.limit_bytes, rewriting, f"{made.how}, copied early", self._timed(rewriting)
        )
        worse = early.cost >= made.cost or not self._holds(early, max(made.limit_bytes, made.peak_bytes))
        return made if worse else early

    def _published(self, limit: int) -> list[Decision]:
        """What the published tuner decides, if it finds that it fits and may be done."""
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
    """Whatever is not in use is away."""
    a = absences_of(plan.step)
    order = np.argsort(a.use, kind="stable")
    a = a.select(order)
    sources = np.zeros(len(a), np.bool_)
    seen = set[int]()
    for row in np.argsort(a.last, kind="stable").tolist():
        sources[row] = int(a.buffer[row]) not in seen
        seen.add(int(a.buffer[row]))
    return Schedule(a.buffer, a.last, a.last, a.last + 1, a.use, a.use, sources)

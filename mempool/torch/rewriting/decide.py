"""What to do with the values of a step, by the options."""

from __future__ import annotations

import contextlib
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from mempool.torch.rewriting.asking import Extreme
from mempool.torch.rewriting.decided import Decided
from mempool.torch.swapping.host_memory import default_host_limit
from solvers.errors import PlanError
from solvers.rewriting import Rewriting, rewrite
from solvers.rewriting.choose import Chooser
from solvers.rewriting.levels import levels_of
from solvers.rewriting.passes import by_pass
from solvers.rewriting.pauses import between, paused, unpaused
from solvers.rewriting.rules import Rules, matching, published
from solvers.rewriting.timed import simulate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mempool.torch.rewriting.options import Options
    from mempool.torch.rewriting.step import Step
    from solvers.rewriting import Graph

#: Bytes of tickets on the way, for each value that may leave.
_TICKETS = 16
#: How often to look for the most bytes that a graph can leave to others, and for those with a small host.
_TRIES, _HALVINGS = 16, 4
#: Levels between readers that share a copy back, where no limit decides.
_NEIGHBOURS = 5


class Deciding:
    """About one step, for any number of limits."""

    def __init__(self, step: Step, options: Options, outside_bytes: int = 0, *, least: bool = False) -> None:
        """Nothing is decided yet.

        Args:
            step: what is known of it.
            options: of the backend.
            outside_bytes: what lies on the device beside what the graphs see.
            least: keep no more from the forward to the backward pass than must be.
        """
        self.step, self.options, self.keeps_little = step, options, least
        self._graph, self._outside_bytes = step.decidable, outside_bytes
        self._choosers: dict[int, Chooser] = {}

    def least(self) -> int:
        """The lowest limit that can be held."""
        return self._chooser(0).least()[0]

    def decide(self) -> Decided:
        """By the options.

        Raises:
            PlanError: the limit cannot be held.
        """
        limit = self.options.limit
        return self._decided(_beyond(self._graph, self.options)) if limit is None else self.within(limit)

    def within(self, limit: int) -> Decided:
        """By the options, but for another limit.

        Raises:
            PlanError: it cannot be held.
        """
        if not self.keeps_little or (room := self._room(limit)) <= 0:
            return self._with_room(0, limit)
        with contextlib.suppress(PlanError):
            return self._with_room(room, limit)
        found = self._with_room(0, limit)  # the host is too small
        fewest, most = limit - room, between(found.rewritten) + found.outside_bytes
        for _ in range(_HALVINGS):
            middle = (fewest + most) // 2
            try:
                found, most = self._with_room(limit - middle, limit), middle
            except PlanError:
                fewest = middle
        return found

    def kept_bytes(self, limit: int) -> int:
        """What is kept between the passes within a limit; within one that cannot be held, all that may be."""
        try:
            return self.within(limit).kept_bytes
        except PlanError:
            return self._all_bytes

    def extreme(self, asked: Extreme) -> Decided:
        """What depends on nothing that is measured: the same each time that it is asked.

        Raises:
            PlanError: the host is too small for it.
        """
        if asked is Extreme.ALL:
            return self._decided(self._chooser(0).everything().rewriting)
        nominal = self._nominal
        limit = nominal.least() if asked is Extreme.LEAST else 2 * self._all_bytes
        return self._decided(nominal.within(limit).rewriting)

    @cached_property
    def _nominal(self) -> Deciding:
        return Deciding(self.step.nominal(), self.options, self._outside_bytes, least=self.keeps_little)

    @cached_property
    def _all_bytes(self) -> int:
        """More than a step can need."""
        graph = self._graph
        tickets = _TICKETS * len(graph.size)
        return self._outside_bytes + int(graph.size.sum() + graph.workspace.max(initial=0)) + tickets

    def _room(self, limit: int) -> int:
        """The most bytes that can be left of a limit between the passes; 0 where it cannot be held."""
        if not self._graph.backward.any() or limit < self.least():
            return 0
        low, high = 0, limit - (self._chooser(self._all_bytes).least()[0] - self._all_bytes)
        room = high
        for _ in range(_TRIES):
            if room <= low:
                break
            over = self._chooser(room).least()[0] - limit
            if over <= 0:
                low = room - over  # a byte more of room needs at most a byte more
            else:
                high = room - over
            room = (low + high + 1) // 2 if low < high else low
        return low

    def _with_room(self, room: int, limit: int) -> Decided:
        """Within a limit, of which so much is left between the passes."""
        made = self._chooser(room).decide(limit).rewriting
        return self._decided(unpaused(self._graph, made) if room else made)

    def _chooser(self, room: int) -> Chooser:
        """Decides as if so much more were there between the passes."""
        if room not in self._choosers:
            graph, options = self._graph, self.options
            self._choosers[room] = Chooser(
                paused(graph, room) if room else graph,
                self.step.link,
                calls=self.step.calls,
                outside_bytes=self._outside_bytes + _TICKETS * int(graph.movable.sum()),
                host_limit=options.host_limit or default_host_limit(),
                movable=_chosen(graph, options),
            )
        return self._choosers[room]

    def _decided(self, rewriting: Rewriting) -> Decided:
        graph, step, outside = self._graph, self.step, self._outside_bytes
        # As the two graphs carry it out.
        rewritten = step.calls.within(rewrite(graph, by_pass(graph, rewriting)))
        plain, timed = (simulate(one, step.link, outside_bytes=outside) for one in (graph, rewritten))
        return Decided(step.captured, rewriting, rewritten, plain, timed, outside, step.calls.own_bytes)


def _chosen(graph: Graph, options: Options) -> NDArray[np.bool_]:
    """Values whose maker the patterns name: bool[M]."""
    made = matching(graph, options.include) if options.include else np.ones(len(graph), bool)
    made &= ~matching(graph, options.exclude)
    result: NDArray[np.bool_] = made[graph.producer]
    return result


def _beyond(graph: Graph, options: Options) -> Rewriting:
    """Every value at a distance, by the published rules; neighbours share a copy back."""
    rules = Rules(threshold=options.threshold or 0, ahead=1, groupby=_NEIGHBOURS)
    chosen = graph.with_columns(movable=graph.movable & _chosen(graph, options)[graph.base])
    return published(chosen, levels_of(graph), rules)

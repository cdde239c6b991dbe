"""Decide about the values of a step according to the options: keep, offload or recompute."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from mempool.torch.compiled.constraints import ALONE, Terms
from mempool.torch.compiled.decision import Decided
from mempool.torch.compiled.graph_budget import TICKET_BYTES
from mempool.torch.compiled.inductor.limit_search import Extreme
from mempool.torch.offload.host_memory import default_host_limit
from solvers.errors import PlanError
from solvers.rewriting import Rewriting, apply_rewriting
from solvers.rewriting.decide import Decider
from solvers.rewriting.distance_rule import matching_operations, offload_beyond
from solvers.rewriting.judge import simulate
from solvers.rewriting.pass_boundary import (
    Pause,
    add_backward_results,
    insert_pause,
    remove_pause,
    simulate_with_pause,
    split_by_pass,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mempool.torch.compiled.options import Options
    from mempool.torch.compiled.step import Step
    from solvers.rewriting import Graph
    from solvers.rewriting.records import Decision, Simulation

#: `_TRIES`: most steps of the search for the largest room between the passes. `_HALVINGS`: steps of the
#: search for the fewest kept bytes if the host is too small.
_TRIES, _HALVINGS = 16, 4


class Deciding:
    """Decisions about one step, for any number of limits."""

    def __init__(self, step: Step, options: Options, terms: Terms = ALONE) -> None:
        """Prepare the graph; decide nothing yet.

        Args:
            step: the graphs and times.
            options: the options of the backend.
            terms: the constraints on the decision.
        """
        self.step, self.options, self.terms = step, options, terms
        graph, captured, outside = step.decidable, step.captured, terms.outside
        if terms.gradients_stay:
            graph = graph.with_columns(lasting=graph.lasting | np.isin(graph.base, captured.incoming))
        self._graph = add_backward_results(graph, outside.backward) if outside.backward else graph
        self._pauses = bool(self._graph.backward.any())
        leaving = captured.results if terms.least and options.limit is not None else ()
        self._pause = Pause(terms.between, outside.forward, (*leaving, *terms.going), captured.incoming)
        self._host_limit = allowed_host_bytes(options) if terms.host_limit is None else terms.host_limit
        self._choosers: dict[int, Decider] = {}

    def least(self) -> int:
        """Return the lowest feasible limit in bytes."""
        return self._chooser(self.terms.between).least()[0]

    def decide(self) -> Decided:
        """Decide according to the options.

        Raises:
            PlanError: the limit is infeasible.
        """
        limit = self.options.limit
        return self.of(_beyond(self._graph, self.options)) if limit is None else self.within(limit)

    def within(self, limit: int) -> Decided:
        """Decide according to the options, but for another limit.

        Raises:
            PlanError: the limit is infeasible.
        """
        outside, keep, between_bytes = self.terms.outside, self.terms.keep, self.terms.between
        if not self.terms.least or (room := self._room(limit)) <= between_bytes:
            return self._with_room(between_bytes, limit)
        if keep:
            tickets = TICKET_BYTES * int(self._graph.movable.sum())
            kept = outside.during(backward=False) + tickets + keep
            room = max(min(room, limit - kept), between_bytes)
        with contextlib.suppress(PlanError):
            return self._with_room(room, limit)
        found = self._with_room(between_bytes, limit)  # the host is too small
        fewest, most = limit - room, found.kept_bytes + outside.during(backward=False)
        for _ in range(_HALVINGS):
            middle = (fewest + most) // 2
            try:
                found, most = self._with_room(limit - middle, limit), middle
            except PlanError:
                fewest = middle
        return found

    def kept_bytes(self, limit: int) -> int:
        """Return the bytes kept between the passes within a limit; all bytes if the limit is infeasible."""
        try:
            return self.within(limit).kept_bytes
        except PlanError:
            return self._all_bytes

    def extreme(self, asked: Extreme) -> Decided:
        """Return a decision that depends on no measurement, and so is the same at each call.

        Raises:
            PlanError: the host is too small.
        """
        if asked is Extreme.ALL:
            return self._made(self._chooser(self.terms.between).offload_everything())
        nominal = self._nominal
        limit = nominal.least() if asked is Extreme.LEAST else 2 * self._all_bytes
        return self.of(nominal.within(limit).rewriting)

    @cached_property
    def _nominal(self) -> Deciding:
        return Deciding(self.step.nominal(), self.options, replace(self.terms, host_limit=self._host_limit))

    @cached_property
    def _all_bytes(self) -> int:
        """Return an upper bound on the bytes that a step can need."""
        graph = self._graph
        tickets = TICKET_BYTES * len(graph.size)
        outside = self.terms.outside.during(backward=False)
        return outside + int(graph.size.sum() + graph.workspace.max(initial=0)) + tickets

    def _room(self, limit: int) -> int:
        """Return the largest room in bytes that a limit leaves between the passes; 0 if infeasible."""
        if not self._pauses or limit < self.least():
            return 0
        low, high = self.terms.between, limit - (self._chooser(self._all_bytes).least()[0] - self._all_bytes)
        room = high
        for _ in range(_TRIES):
            if room <= low:
                break
            over = self._chooser(room).least()[0] - limit
            if over <= 0:
                low = room - over  # one more byte of room raises the least limit by at most one byte
            else:
                high = room - over
            room = (low + high + 1) // 2 if low < high else low
        return low

    def _with_room(self, room: int, limit: int) -> Decided:
        """Decide within a limit that leaves `room` bytes between the passes."""
        return self._made(self._chooser(room).decide(limit))

    def _made(self, made: Decision) -> Decided:
        """Convert the decision of a chooser."""
        rewriting = made.rewriting
        return self.of(remove_pause(self._graph, rewriting) if self._pauses else rewriting)

    def _chooser(self, room: int) -> Decider:
        """Return the chooser for a graph with `room` additional bytes in use between the passes."""
        if room not in self._choosers:
            graph, options = self._graph, self.options
            if self._pauses:
                graph = insert_pause(graph, replace(self._pause, extra_bytes=room))
            self._choosers[room] = Decider(
                graph,
                self.step.link,
                overhead=self.step.calls,
                outside_bytes=self.terms.outside.always + TICKET_BYTES * int(graph.movable.sum()),
                host_limit=self._host_limit,
                movable=_chosen(graph, options),
                repeatable=~np.isin(graph.base, self._pause.leaving),
            )
        return self._choosers[room]

    def of(self, rewriting: Rewriting) -> Decided:
        """Apply decisions to the step and simulate the result."""
        graph, step, outside = self._graph, self.step, self.terms.outside
        # Rewritten in the way in which the two graphs carry out the decisions.
        rewritten = step.calls.applied_to(apply_rewriting(graph, split_by_pass(graph, rewriting)))
        plain, timed = (self._simulated(one) for one in (graph, rewritten))
        leaving, stay, own = self._pause.leaving, self.terms.gradients_stay, step.calls.inline_bytes
        taken = self.terms.between
        return Decided(step.captured, rewriting, rewritten, plain, timed, outside, leaving, stay, taken, own)

    def _simulated(self, graph: Graph) -> Simulation:
        link, outside = self.step.link, self.terms.outside.always
        if self._pauses:
            return simulate_with_pause(graph, self._pause, link, outside_bytes=outside)
        return simulate(graph, link, outside_bytes=outside)


def allowed_host_bytes(options: Options) -> int:
    """Return the host bytes that copies may use."""
    return options.host_limit or default_host_limit()


def _chosen(graph: Graph, options: Options) -> NDArray[np.bool_]:
    """Return the mask of values whose operation matches the include and exclude filters: bool[M]."""
    made = matching_operations(graph, options.include) if options.include else np.ones(len(graph), bool)
    made &= ~matching_operations(graph, options.exclude)
    result: NDArray[np.bool_] = made[graph.producer]
    return result


def _beyond(graph: Graph, options: Options) -> Rewriting:
    """Offload every value to its readers beyond the threshold."""
    chosen = graph.with_columns(movable=graph.movable & _chosen(graph, options)[graph.base])
    return offload_beyond(chosen, options.threshold or 0)

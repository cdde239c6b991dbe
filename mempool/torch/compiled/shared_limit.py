"""Limit shared by the graphs of one call of `torch.compile`, and the decision about each graph."""

from __future__ import annotations

import atexit
import contextlib
import functools
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from mempool.torch.compiled.decide import StepDecider, allowed_host_bytes
from mempool.torch.compiled.options import TUNABLES
from mempool.torch.compiled.records import NO_OBSERVATIONS, TICKET_BYTES, Constraints, OutsideBytes, RunStart
from mempool.torch.compiled.runtime_observer import RuntimeObserver
from mempool.torch.optimizer_steps import Listener
from mempool.units import typed_size
from solvers.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from mempool.torch.compiled.decide import Step
    from mempool.torch.compiled.joint_graph import MergedGraph
    from mempool.torch.compiled.options import Options
    from mempool.torch.compiled.records import CompiledGraph, ExternalMemory, Observations, StepDecision


@dataclass(eq=False)
class SharedLimit:
    """The graphs compiled for one call of `torch.compile`.

    Attributes:
        key: the options object of the call, which identifies the call.
        graphs: by graph number, the latest compilation.
        observer: the observer of the graphs' runs.
        relative_bytes: a relative limit in bytes, as a share of the largest peak so far.
    """

    key: Any
    graphs: dict[int, CompiledGraph] = field(default_factory=dict)
    observer: RuntimeObserver = field(default_factory=RuntimeObserver)
    relative_bytes: int = 0

    def bytes_kept_before(self, number: int) -> int:
        """Return the predicted bytes that earlier graphs keep while a graph runs, if each ran once."""
        return sum(compiled.decision.kept_bytes for compiled in self._before(number))

    def kept_within(self, number: int, limit: int) -> int:
        """Return the bytes that earlier graphs would keep within another limit."""
        kept = 0
        for compiled in self._before(number):
            kept += compiled.kept_within(limit, kept)
        return kept

    def tickets_before(self, number: int) -> int:
        """Return the most bytes of tickets that earlier graphs hold."""
        movable = (compiled.decision.captured.graph.movable.sum() for compiled in self._before(number))
        return TICKET_BYTES * int(sum(movable))

    def feasible_limit(self, number: int, limit: int, least: int) -> int:
        """Return the least feasible limit for a graph, within a tolerance.

        Args:
            number: the number of the graph.
            limit: an infeasible limit.
            least: a limit that is feasible with the bytes that earlier graphs keep now.
        """
        own = least - self.bytes_kept_before(number)

        def holds(limit: int) -> bool:
            return own + self.kept_within(number, limit) <= limit

        fewest = own + self.kept_within(number, least)
        if fewest >= least or (fewest > limit and holds(fewest)):
            return min(fewest, least)
        low, high = max(fewest, limit), least
        while high - low > max(least * TUNABLES.limit_tolerance, 1):
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle, high)
        return high

    def note_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare new optimizer state with the assumed bytes, and recompile exceeding graphs."""
        if not self.observer.is_open:
            return
        state = self.observer.live_memory.add_state(optimizer)
        for number, compiled in self.graphs.items():
            observed = self.observer.observed[number]
            if state <= observed.state or compiled.options.limit is None:
                continue
            observed.state = state
            outside_bytes = max(compiled.options.beside, state)
            needed = (
                compiled.needed_bytes(outside_bytes + observed.bytes(backward=backward), backward=backward)
                for backward in (False, True)
            )
            if max(needed) > compiled.tolerated_limit:
                self.observer.mark_stale(number)
        self.observer.discard_stale()

    def drop_limit_functions(self) -> None:
        """Drop the functions that compute the bytes kept within other limits."""
        self.graphs.update(
            {number: replace(compiled, kept_bytes_at=None) for number, compiled in self.graphs.items()}
        )

    def _before(self, number: int) -> list[CompiledGraph]:
        """Return the earlier graphs in order."""
        return [compiled for earlier, compiled in sorted(self.graphs.items()) if earlier < number]

    def host_before(self, number: int) -> int:
        """Return the start of a graph's copies in the host arena: the end of the copies of earlier graphs."""
        return max((compiled.host_end for compiled in self._before(number)), default=0)

    def add(self, compiled: CompiledGraph) -> None:
        """Add a graph."""
        self.graphs[compiled.number] = compiled
        if not compiled.more:
            self.drop_limit_functions()


def warn_of_excess(most: int, limit: int | None) -> None:
    """Warn of a peak above the limit, unless other limits exist, whose graphs may use the memory."""
    used = [limit for limit in SHARED_LIMITS if limit.graphs and limit.observer.live_memory.is_used]
    if len(used) == 1:
        warnings.warn(
            f"{most} bytes are on the device, more than the limit of {limit}, though the graphs hold it: "
            "uncompiled code takes the rest, or other memory of the program; PyTorch compiles nothing of a "
            "function with a graph break inside a loop, unless the functions called there are "
            "compiled separately",
            stacklevel=2,
        )


#: The latest shared limits, in the order of their first use.
SHARED_LIMITS: list[SharedLimit] = []
atexit.register(SHARED_LIMITS.clear)  # objects made by native code are freed before that code is unloaded


@functools.cache
def _listen() -> None:
    """Observe the steps of all optimizers."""

    def after(optimizer: torch.optim.Optimizer) -> None:
        for limit in SHARED_LIMITS:
            limit.note_optimizer_step(optimizer)

    Listener(after=after)


def shared_limit_of(options: Mapping[str, Any] | None) -> SharedLimit:
    """Return the shared limit of a call, identified by the options object that each compilation passes."""
    for shared_limit in SHARED_LIMITS:
        if shared_limit.key is options:
            return shared_limit
    for shared_limit in SHARED_LIMITS:
        shared_limit.drop_limit_functions()
    _listen()
    SHARED_LIMITS.append(SharedLimit(options))
    del SHARED_LIMITS[: -TUNABLES.shared_limits]
    return SHARED_LIMITS[-1]


class LimitedDecision(NamedTuple):
    """A decision about a graph, the kept bytes as a function of the limit, and the limit in effect."""

    decision: StepDecision
    kept_bytes_at: Callable[[int], int]
    limit: int | None


@dataclass(frozen=True)
class GraphUnderLimit:
    """The inputs of the decision about one graph.

    A graph with later graphs keeps as few bytes as possible, because the needs of later graphs are unknown.

    Attributes:
        options: the options of the backend.
        shared_limit: the graphs that share the limit.
        number: the number of the graph.
        more: true if other graphs run after this graph.
        external: memory in use outside the graph when the graph is compiled.
    """

    options: Options
    shared_limit: SharedLimit
    number: int
    more: bool
    external: ExternalMemory

    @functools.cached_property
    def counted_external(self) -> ExternalMemory:
        """Return the memory in use outside the graph: observed in earlier runs, else the present memory."""
        external, observed = self.external, self._observed
        if observed is None:
            return external
        starts = (observed.largest_moment(backward=backward) for backward in (False, True))
        start = max(starts, key=RunStart.bytes)
        held, own = start.others, start.own + start.waiting
        return replace(external, held=held, own=own, parameters=start.parameters)

    def outside(self, kept: int) -> OutsideBytes:
        """Return the bytes outside the graph in each pass, if each run of the graph keeps `kept` bytes."""
        external, observed = self.external, self._observed
        if observed is None:
            passes = (
                external.held + external.own + external.parameters,
                external.kept + external.own + external.parameters + external.gradients,
            )
        else:
            passes = (
                max(observed.bytes(kept, backward=False), external.held + external.parameters),
                max(observed.bytes(kept, backward=True), external.kept + external.parameters),
            )
        always = min(passes)
        return OutsideBytes(self._constant_bytes + always, *(total - always for total in passes))

    @functools.cached_property
    def _constant_bytes(self) -> int:
        """Return the bytes in use outside the graph at any time, independent of the passes."""
        return self._declared_bytes + self._library_bytes

    @property
    def _declared_bytes(self) -> int:
        """Return the outside bytes of the options, or the optimizers' state if larger."""
        observed = 0 if self._observed is None else self._observed.state
        return max(self.options.beside, self.external.state, observed)

    @property
    def _library_bytes(self) -> int:
        """Return the cuBLAS workspaces of the forward thread and of PyTorch's own backward thread."""
        return 2 * self.external.library

    @functools.cached_property
    def runs(self) -> int:
        """Return the largest known number of concurrent runs of the graph."""
        return 1 + (self._observed or NO_OBSERVATIONS).runs

    def with_limit_in_bytes(self, merged: MergedGraph, step: Step) -> GraphUnderLimit:
        """Return a copy with the limit in bytes; a share refers to the largest peak of any graph so far."""
        if not self.options.share:
            return self
        peak = self._decide_within_limit(merged, step).decision.peak_bytes
        shared = self.shared_limit
        shared.relative_bytes = max(shared.relative_bytes, int(self.options.share * peak))
        return replace(self, options=replace(self.options, limit=shared.relative_bytes, share=0.0))

    def least_limit(self, merged: MergedGraph, step: Step) -> int | None:
        """Return the least feasible limit in bytes; None without a limit, or if operations are fused."""
        if self.options.fused or self.options.limit is None:
            return None
        try:
            replace(self, options=replace(self.options, limit=1))._decide_within_limit(merged, step)
        except PlanError as error:
            return self._infeasible_error(error).least_bytes
        return None

    def decide(self, merged: MergedGraph, step: Step) -> LimitedDecision:
        """Decide about the graph.

        If the limit is infeasible because waiting graphs kept too much, not knowing of later graphs,
        recompile those graphs for the next step. For this step, use the least feasible limit.

        Raises:
            PlanError: the limit is infeasible.
        """
        try:
            return self._decide_within_limit(merged, step)
        except PlanError as error:
            if error.least_bytes is not None and (unaware := self._graphs_without_successor()):
                self.shared_limit.observer.add_successor(unaware, self.number)
                least = replace(self.options, limit=error.least_bytes)
                with contextlib.suppress(PlanError):
                    return replace(self, options=least)._decide_within_limit(merged, step)
            raise self._infeasible_error(error) from None

    def _graphs_without_successor(self) -> list[int]:
        """Return the other waiting graphs whose decisions assumed no later graph."""
        graphs = self.shared_limit.graphs
        waiting = (
            other
            for other in self.shared_limit.observer.waiting()
            if other != self.number and other in graphs
        )
        return [other for other in waiting if not graphs[other].more]

    def _decide_within_limit(self, merged: MergedGraph, step: Step) -> LimitedDecision:
        """Decide within the limit of the options."""
        decision, kept_bytes_at = self._keep_least(merged, step)
        if self.runs > 1 and len(self.shared_limit.graphs) <= 1:
            decision = self._keep_more(merged, step, decision)
        return LimitedDecision(decision, kept_bytes_at, self.options.limit)

    @functools.cached_property
    def _observed(self) -> Observations | None:
        return self.shared_limit.observer.known.get(self.number)

    @functools.cached_property
    def _host_bytes(self) -> int:
        """Return the host bytes that the copies of earlier graphs leave for this graph's runs."""
        return max(allowed_host_bytes(self.options) - self.shared_limit.host_before(self.number), 0)

    def _keep_least(self, merged: MergedGraph, step: Step) -> tuple[StepDecision, Callable[[int], int]]:
        """Decide with as few kept bytes as possible if the graph has later graphs or concurrent runs."""
        kept = 0
        for _ in range(TUNABLES.decision_rounds):
            decision, kept_bytes_at = self._decide_with(merged, step, kept, least=self.more or self.runs > 1)
            if self.runs == 1 or decision.kept_bytes <= kept:
                break
            kept = decision.kept_bytes  # each run now has fewer bytes, and may have to keep more
        return decision, kept_bytes_at

    def _keep_more(self, merged: MergedGraph, step: Step, found: StepDecision) -> StepDecision:
        """Search for a decision of at most equal time whose runs keep more bytes.

        For a graph without successor.
        """
        low, high = found.kept_bytes, max((self._observed or NO_OBSERVATIONS).kept, found.kept_bytes)
        for _ in range(TUNABLES.kept_steps):
            kept = (low + high + 1) // 2
            try:
                decision, _ = self._decide_with(merged, step, kept, least=True, keep=kept)
            except PlanError:
                high = kept
                continue
            if decision.kept_bytes <= kept and decision.simulated.seconds <= found.simulated.seconds:
                found = decision
            low = kept
        return found

    def _decide_with(
        self, merged: MergedGraph, step: Step, kept: int, *, least: bool, keep: int = 0
    ) -> tuple[StepDecision, Callable[[int], int]]:
        """Decide under the assumption that every other run keeps `kept` bytes."""
        observed = self._observed or NO_OBSERVATIONS
        constraints = Constraints(
            outside=self.outside(kept),
            freed_inputs=step.captured.arguments_at(self.external.freed_inputs),
            gradients_stay=observed.gradients_stay,
            keep_least=least,
            keep_bytes=keep,
            between_bytes=observed.between,
            host_limit=self._host_bytes // self.runs,
        )
        decider = StepDecider(step, self.options, constraints)
        if self.options.fused and self.options.limit is not None:
            return _decide_fused(merged, decider, self.options.limit)
        return decider.decide(), decider.kept_bytes

    def _infeasible_error(self, error: PlanError) -> PlanError:
        """Error for a limit that is infeasible given the memory in use outside this graph."""
        limit, least, external = self.options.limit, error.least_bytes, self.counted_external
        reasons = [str(error)]
        if external.held:
            reasons.append(f"of that, graphs before it and gradients hold {external.held} bytes")
        if external.held and limit is not None and least is not None:
            feasible_limit = self.shared_limit.feasible_limit(self.number, limit, least)
            fewer = self.shared_limit.bytes_kept_before(self.number) - self.shared_limit.kept_within(
                self.number, feasible_limit
            )
            tickets = self.shared_limit.tickets_before(self.number)
            least = feasible_limit + tickets
            within = f"{external.held - fewer + tickets} at most within a limit of {least}"
            reasons[-1] += f", and {within}, which is enough"
        if external.own:
            reasons.append(f"of that, other runs of it hold {external.own} bytes")
        if between := (self._observed or NO_OBSERVATIONS).between:
            reasons.append(f"between its passes uncompiled code takes {between} bytes")
        if external.parameters:
            reasons.append(f"of that, {external.parameters} bytes are parameters that it does not read")
        if self._declared_bytes:
            reasons.append(
                f"of that, {self._declared_bytes} bytes are outside all graphs, such as an optimizer's state"
            )
        if self._library_bytes:
            reasons.append(f"of that, {self._library_bytes} bytes are kept by cuBLAS")
        if least is not None:
            reasons.append(f'try limit="{typed_size(least)}"')
        return PlanError("; ".join(reasons), least)


def _decide_fused(
    merged: MergedGraph, decider: StepDecider, limit: int
) -> tuple[StepDecision, Callable[[int], int]]:
    """Decide about a graph with fused operations."""
    try:
        from mempool.torch.compiled.inductor.fused import fit_kernels

        decision, tried = fit_kernels(merged, decider, limit)
        return decision, functools.partial(least_kept_bytes, tried)
    except PlanError:
        raise
    except Exception as error:  # inductor's internals may fail in any way
        warnings.warn(
            f"the memory of fused kernels could not be counted, so the limit counts each operation "
            f"separately: {error}",
            stacklevel=2,
        )
        return decider.decide(), decider.kept_bytes


def least_kept_bytes(tried: Sequence[StepDecision], limit: int) -> int:
    """Return the fewest bytes kept between the passes by any decision in `tried` that holds a limit.

    If no decision holds the limit, return the most bytes that any decision keeps.
    """
    within = [decision.kept_bytes for decision in tried if decision.peak_bytes <= limit]
    return min(within, default=max(decision.kept_bytes for decision in tried))

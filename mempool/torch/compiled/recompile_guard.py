"""Guard of a graph's runs: recompiles the graph if the memory outside exceeds the assumed bytes."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mempool.torch.compiled.external_memory import ForwardRun, bytes_of, total
from mempool.torch.compiled.records import RunStart
from mempool.torch.compiled.shared_limit import warn_of_excess

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mempool.torch.compiled.external_memory import Memories
    from mempool.torch.compiled.records import CompiledGraph, Observations
    from mempool.torch.compiled.runtime_observer import RuntimeObserver


@dataclass(eq=False)
class RunGuard:
    """Observer of the runs of one graph.

    Attributes:
        observer: the observations of all graphs that share the limit.
        graphs: the graphs that share the limit.
        number: the number of the graph.
        results: number of results that the function uses from the graph; by default all results.
        incoming_gradients: the inputs of the backward pass that are gradients.
        parameters: bytes of the parameters that the graph does not read.
        compiled: the decision about the graph; None if there is no decision, as for a graph that has no
            backward pass.
    """

    observer: RuntimeObserver
    graphs: dict[int, CompiledGraph]
    number: int
    results: int = sys.maxsize
    incoming_gradients: slice = field(default_factory=lambda: slice(0, 0))
    parameters: int = 0
    compiled: CompiledGraph | None = None
    _outside_bytes: int = 0

    @property
    def observed(self) -> Observations:
        """Return the observations of the memory outside this graph."""
        return self.observer.observed[self.number]

    def wrap(self, run: Callable[..., Any], *, backward: bool) -> Callable[..., Any]:
        """Return a callable that observes the runs of `run`; both take one list, as AOTAutograd expects."""
        guarded = (self._backward if backward else self._forward)(run)
        guarded._boxed_call = True  # type: ignore[attr-defined]
        return guarded

    def _forward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        observer, live_memory = self.observer, self.observer.live_memory

        def guarded(arguments: list[Any]) -> Any:
            if not observer.is_open:
                return run(arguments)
            self._begin_run(backward=False)
            given, freed_inputs = live_memory.memories(arguments), {}
            if self.compiled is not None:
                live_memory.register_parameters(arguments)
                self._record_start(self.compiled, given, live_memory.runs(self.number), {})
                freed_inputs = live_memory.memories(arguments[i] for i in self.compiled.external.freed_inputs)
            parameters = live_memory.parameters()
            result = run(arguments)
            requested, kept = (
                live_memory.memories(some) for some in (result[: self.results], result[self.results :])
            )
            given, kept = (
                {memory: size for memory, size in some.items() if memory not in parameters}
                for some in (given, kept)
            )
            live_memory.record_forward(self.number, ForwardRun(given, requested, kept, freed_inputs))
            observer.high_water.after_run(self.number, backward=False)
            return result

        return guarded

    def _backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        observer, live_memory = self.observer, self.observer.live_memory

        def guarded(arguments: list[Any]) -> Any:
            if not observer.is_open:
                result = run(arguments)
                if self.compiled is not None:
                    observer.reopen_on_excess(self.compiled.tolerated_limit)
                return result
            self._begin_run(backward=True)
            gradients = live_memory.tensor_refs(
                arguments[self.incoming_gradients]
            )  # only this run refers to the gradients
            if self.compiled is not None:
                given = live_memory.memories(
                    [*arguments[: self.incoming_gradients.start], *arguments[self.incoming_gradients.stop :]]
                )
                runs = live_memory.runs(self.number)
                left: Memories = {}
                if runs:  # one of the runs is the forward run of this backward pass
                    own = max(runs, key=lambda run: len(run.kept.keys() & given.keys()))
                    runs.remove(own)
                    given |= {
                        memory: size for memory, size in own.given.items() if memory not in own.freed_inputs
                    }
                    if self.compiled.decision.frees_results:
                        left = own.results
                    else:
                        given |= own.requested
                    own.has_ended = True
                self._record_start(self.compiled, given, runs, left, arguments[self.incoming_gradients])
            result = run(arguments)
            live_memory.record_backward(result)
            if self.compiled is not None and not self.compiled.decision.gradients_stay:
                stays = bytes_of(gradients, but=live_memory.tensor_refs(result))
                self.observed.gradients_stay |= stays > 0
                self._check_limit(self.compiled, self._outside_bytes + stays, backward=True)
            observer.high_water.after_run(self.number, backward=True)
            observer.discard_stale()
            return result

        return guarded

    def _begin_run(self, *, backward: bool) -> None:
        """Start the observation of a run, and evaluate the high-water mark since the previous run."""
        observer = self.observer
        observer.before_run(backward=backward)
        found = observer.high_water.before_run(self.number, backward=backward)
        if found is not None and (compiled := self.graphs.get(found[0])) is not None:
            number, taken = found
            observed = observer.observed[number]
            observed.between = max(observed.between, taken)
            if compiled.decision.pause_bytes(taken) > compiled.tolerated_limit:
                observer.mark_stale(number)
        if (
            not observer.is_open
            and self.compiled is not None
            and observer.high_water.most > self.compiled.tolerated_limit
        ):
            warn_of_excess(observer.high_water.most, self.compiled.options.limit)

    def _record_start(
        self,
        compiled: CompiledGraph,
        given: Memories,
        runs: list[ForwardRun],
        left: Memories,
        gradients: Sequence[Any] | None = None,
    ) -> None:
        """Record the memory outside a starting run, and check the limit with these bytes.

        Args:
            compiled: the decision about the graph.
            given: memory given to the run, without gradients.
            runs: the other runs of the same graph that have not ended.
            left: live memory that the decision assumed to be freed before this run.
            gradients: gradients given to a backward run; None for a forward run.
        """
        observed, live_memory, backward = self.observed, self.observer.live_memory, gradients is not None
        others, parameters = live_memory.others(self.number) | left, live_memory.parameters()
        if not backward:  # a backward run may read fewer parameters
            self.parameters = max(self.parameters, total(parameters, given))
        waiting = {memory: size for run in runs for memory, size in run.awaited_memory.items()}
        own = {memory: size for run in runs for memory, size in run.all.items()}
        others |= live_memory.gradients()
        moment = RunStart(
            others=total(others, given, parameters) + live_memory.pending_gradient_bytes(gradients or ()),
            parameters=self.parameters,
            own=total(own, waiting, given, parameters, others),
            waiting=total(waiting, given, parameters, others),
            runs=sum(bool(run.awaited_memory) for run in runs),
            kept=compiled.decision.kept_bytes,
        )
        observed.note(moment, backward=backward)
        observed.state = max(observed.state, total(live_memory.state()))
        self._outside_bytes = moment.bytes()
        self._check_limit(compiled, self._outside_bytes, backward=backward)

    def _check_limit(self, compiled: CompiledGraph, outside_bytes: int, *, backward: bool) -> None:
        """Mark the graph as stale if the peak with `outside_bytes` exceeds the limit."""
        outside_bytes += max(compiled.options.beside, self.observed.state)
        if compiled.needed_bytes(outside_bytes, backward=backward) > compiled.tolerated_limit:
            self.observer.mark_stale(self.number)

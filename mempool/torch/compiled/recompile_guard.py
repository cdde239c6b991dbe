"""Compare the memory outside a running graph with the assumed bytes, and recompile the graph if exceeded."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mempool.torch.compiled.external_memory import Run, bytes_of, total
from mempool.torch.compiled.records import RunStart
from mempool.torch.compiled.shared_limit import warn_of_excess

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mempool.torch.compiled.external_memory import Memories
    from mempool.torch.compiled.records import CompiledGraph, Observations
    from mempool.torch.compiled.runtime_observer import RuntimeObserver

#: Tolerated excess over a limit, as a share of the limit: a smaller excess is ignored.
_SLIGHT = 1 / 256


@dataclass(eq=False)
class RunGuard:
    """Observer of the runs of one graph.

    Attributes:
        observer: the observations of all graphs that share the limit.
        parts: the graphs that share the limit.
        number: the number of the graph.
        results: number of results that the function requests from the graph; by default all results.
        incoming: the inputs of the backward pass that are gradients.
        parameters: bytes of the parameters that the graph does not read.
        part: the decision about the graph; None if there is no decision, as for a graph that has no
            backward pass.
    """

    observer: RuntimeObserver
    parts: dict[int, CompiledGraph]
    number: int
    results: int = sys.maxsize
    incoming: slice = field(default_factory=lambda: slice(0, 0))
    parameters: int = 0
    part: CompiledGraph | None = None
    _beside: int = 0

    @property
    def seen(self) -> Observations:
        """Return the memory seen so far outside this graph and outside others of the same code."""
        return self.observer.seen[self.number]

    def around(self, run: Callable[..., Any], *, backward: bool) -> Callable[..., Any]:
        """Wrap a callable of one list, like those of AOTAutograd's compilers, with observation."""
        watched = (self._backward if backward else self._forward)(run)
        watched._boxed_call = True  # type: ignore[attr-defined]
        return watched

    def _forward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        observer, present = self.observer, self.observer.present

        def watched(arguments: list[Any]) -> Any:
            if not observer.wanted:
                return run(arguments)
            self._begins(backward=False)
            given, going = present.memories(arguments), {}
            if self.part is not None:
                present.register_parameters(arguments)
                self._look(self.part, given, present.runs(self.number), {})
                going = present.memories(arguments[i] for i in self.part.beside.going)
            parameters = present.parameters()
            result = run(arguments)
            asked, kept = (
                present.memories(some) for some in (result[: self.results], result[self.results :])
            )
            given, kept = (
                {one: size for one, size in some.items() if one not in parameters} for some in (given, kept)
            )
            present.record_forward(self.number, Run(given, asked, kept, going))
            observer.water.ends(self.number, backward=False)
            return result

        return watched

    def _backward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        observer, present = self.observer, self.observer.present

        def watched(arguments: list[Any]) -> Any:
            if not observer.wanted:
                result = run(arguments)
                if self.part is not None:
                    observer.reopen_on_excess(_tolerated_limit(self.part))
                return result
            self._begins(backward=True)
            gradients = present.told(arguments[self.incoming])  # only this run has a share in the gradients
            if self.part is not None:
                given = present.memories(
                    [*arguments[: self.incoming.start], *arguments[self.incoming.stop :]]
                )
                runs = present.runs(self.number)
                left: Memories = {}
                if runs:  # one of the runs is the forward run of this backward pass
                    own = max(runs, key=lambda run: len(run.kept.keys() & given.keys()))
                    runs.remove(own)
                    given |= {one: size for one, size in own.given.items() if one not in own.going}
                    if self.part.decided.results_leave:
                        left = own.results
                    else:
                        given |= own.asked
                    own.over = True
                self._look(self.part, given, runs, left, arguments[self.incoming])
            result = run(arguments)
            present.record_backward(result)
            if self.part is not None and not self.part.decided.gradients_stay:
                stays = bytes_of(gradients, but=present.told(result))
                self.seen.gradients_stay |= stays > 0
                self._compare(self.part, self._beside + stays, backward=True)
            observer.water.ends(self.number, backward=True)
            observer.ends()
            return result

        return watched

    def _begins(self, *, backward: bool) -> None:
        """Start the observation of a run, and evaluate the high-water mark since the previous run."""
        observer = self.observer
        observer.begins(backward=backward)
        found = observer.water.begins(self.number, backward=backward)
        if found is not None and (part := self.parts.get(found[0])) is not None:
            number, taken = found
            seen = observer.seen[number]
            seen.between = max(seen.between, taken)
            if part.decided.pause_bytes(taken) > _tolerated_limit(part):
                observer.stale(number)
        if (
            not observer.wanted
            and self.part is not None
            and observer.water.most > _tolerated_limit(self.part)
        ):
            warn_of_excess(observer.water.most, self.part.options.limit)

    def _look(
        self,
        part: CompiledGraph,
        given: Memories,
        runs: list[Run],
        left: Memories,
        gradients: Sequence[Any] | None = None,
    ) -> None:
        """Record the memory outside a starting run, and check the limit with these bytes.

        Args:
            part: the decision about the graph.
            given: memory given to the run, without gradients.
            runs: the other runs of the same graph that are not over.
            left: memory that the decision assumed to be freed by then and that is still alive.
            gradients: gradients given to a backward run; None for a forward run.
        """
        seen, present, backward = self.seen, self.observer.present, gradients is not None
        others, parameters = present.others(self.number) | left, present.parameters()
        if not backward:  # a backward run need not read everything that the forward run has read
            self.parameters = max(self.parameters, total(parameters, given))
        waiting = {one: size for run in runs for one, size in run.waits.items()}
        own = {one: size for run in runs for one, size in run.all.items()}
        others |= present.gradients()
        moment = RunStart(
            others=total(others, given, parameters) + present.pending_gradient_bytes(gradients or ()),
            parameters=self.parameters,
            own=total(own, waiting, given, parameters, others),
            waiting=total(waiting, given, parameters, others),
            runs=sum(bool(run.waits) for run in runs),
            kept=part.decided.kept_bytes,
        )
        seen.note(moment, backward=backward)
        seen.state = max(seen.state, total(present.state()))
        self._beside = moment.bytes()
        self._compare(part, self._beside, backward=backward)

    def _compare(self, part: CompiledGraph, beside: int, *, backward: bool) -> None:
        """Mark the graph as stale if the peak with `beside` outside bytes exceeds the limit."""
        beside += max(part.options.beside, self.seen.state)
        needs = (
            part.decided.peak_of(backward=backward) + beside - part.decided.outside.during(backward=backward)
        )
        if needs > _tolerated_limit(part):
            self.observer.stale(self.number)


def _tolerated_limit(part: CompiledGraph) -> int:
    """Return the limit plus the tolerated excess."""
    return int((part.options.limit or 0) * (1 + _SLIGHT))

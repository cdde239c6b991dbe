"""Limit shared by the graphs of one call of `torch.compile`, and the decision about each graph under it."""

from __future__ import annotations

import atexit
import contextlib
import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mempool.torch.compiled.decide import StepDecider, allowed_host_bytes
from mempool.torch.compiled.records import NO_OBSERVATIONS, TICKET_BYTES, Constraints, OutsideBytes, RunStart
from mempool.torch.compiled.runtime_observer import RuntimeObserver
from solvers.errors import PlanError
from solvers.rewriting.rules import matching

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mempool.torch.compiled.decide import Step
    from mempool.torch.compiled.joint_graph import MergedGraph
    from mempool.torch.compiled.options import Options
    from mempool.torch.compiled.records import CompiledGraph, ExternalMemory, Observations, StepDecision

#: Tolerance of the search for the least limit that the graphs of a function can hold together, as a share of
#: that limit.
_CLOSE = 0.01


@dataclass(eq=False)
class SharedLimit:
    """The graphs compiled for one call of `torch.compile`.

    Attributes:
        asked: the options object of the call, which identifies the call.
        parts: by graph number, the latest compilation.
        met: name filters that matched anything so far.
        observer: the observer of the graphs' runs.
    """

    asked: Any
    parts: dict[int, CompiledGraph] = field(default_factory=dict)
    met: set[str] = field(default_factory=set)
    observer: RuntimeObserver = field(default_factory=RuntimeObserver)

    def bytes_kept_before(self, number: int) -> int:
        """Return the bytes that earlier graphs are predicted to keep while a graph runs, if each ran once."""
        return sum(part.decided.kept_bytes for part in self._before(number))

    def kept_within(self, number: int, limit: int) -> int:
        """Return the bytes that earlier graphs would keep within another limit."""
        kept = 0
        for part in self._before(number):
            kept += part.kept_within(limit, kept)
        return kept

    def tickets_before(self, number: int) -> int:
        """Return the most bytes of tickets that earlier graphs hold."""
        movable = (part.decided.captured.graph.movable.sum() for part in self._before(number))
        return TICKET_BYTES * int(sum(movable))

    def feasible_limit(self, number: int, limit: int, least: int) -> int:
        """Return a feasible limit for a graph: the lowest one, or slightly more.

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
        while high - low > max(least * _CLOSE, 1):
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle, high)
        return high

    def forget(self) -> None:
        """Drop the functions for the bytes kept within other limits, which are not needed any more."""
        self.parts.update({number: replace(one, keeps=None) for number, one in self.parts.items()})

    def _before(self, number: int) -> list[CompiledGraph]:
        """Return the earlier graphs in order."""
        return [part for one, part in sorted(self.parts.items()) if one < number]

    def host_before(self, number: int) -> int:
        """Return the start of a graph's copies in the host arena: the end of the copies of earlier graphs."""
        return max((part.host_end for part in self._before(number)), default=0)

    def add(self, part: CompiledGraph) -> None:
        """Add a graph; after a function's last graph, warn once of name filters without any match."""
        self.parts[part.number] = part
        if not part.more:
            self.forget()
        graph, options = part.decided.captured.graph, part.options
        patterns = {*options.include, *options.exclude} - self.met
        self.met |= {one for one in patterns if matching(graph, [one]).any()}
        if not part.more and (strange := sorted(patterns - self.met)):
            self.met |= patterns
            names = [*graph.kinds[:3], *[one for one in graph.modules if one][:3]]
            warnings.warn(
                f"no operation or module is named {', '.join(map(repr, strange))} by include or exclude; "
                f"there are such as {', '.join(map(repr, names))}",
                stacklevel=2,
            )


def warn_of_excess(most: int, limit: int | None) -> None:
    """Warn of a peak above the limit if only one budget is in use; otherwise others may use the memory."""
    if sum(bool(budget.parts) and budget.observer.present.is_used for budget in SHARED_LIMITS) == 1:
        warnings.warn(
            f"{most} bytes are on the device, more than the limit of {limit}, though graphs hold it: what is "
            "not compiled takes the rest, or lies beside; PyTorch compiles nothing of a function that stops "
            "in the middle of a loop, unless what it calls there is compiled by itself",
            stacklevel=2,
        )


#: The latest budgets, in the order of their first use.
SHARED_LIMITS: list[SharedLimit] = []


atexit.register(SHARED_LIMITS.clear)  # objects made by native code are freed before that code is unloaded


_MOST = 64


def shared_limit_of(options: Mapping[str, Any] | None) -> SharedLimit:
    """Return the budget of a call, identified by the options object that each compilation passes."""
    for budget in SHARED_LIMITS:
        if budget.asked is options:
            return budget
    for budget in SHARED_LIMITS:
        budget.forget()
    SHARED_LIMITS.append(SharedLimit(options))
    del SHARED_LIMITS[:-_MOST]
    return SHARED_LIMITS[-1]


#: Most decisions per graph while searching for one whose runs keep no more bytes than the decision assumed.
_ROUNDS = 8


#: Steps of the binary search for the bytes that each run may keep, beyond the bytes that a run must keep.
_HALVINGS = 4


class LimitedDecision(NamedTuple):
    """A decision about a graph, the bytes kept as a function of the limit, and the limit that was used."""

    made: StepDecision
    keeps: Callable[[int], int]
    limit: int | None


@dataclass(frozen=True)
class GraphUnderLimit:
    """The inputs of the decision about one graph.

    A graph that others follow keeps as few bytes as possible, because the needs of the later graphs are
    unknown.

    Attributes:
        options: the options of the backend.
        budget: the graphs that share the limit.
        number: the number of the graph.
        more: true if other graphs run after this graph.
        now: memory in use outside the graph when the graph is compiled.
    """

    options: Options
    budget: SharedLimit
    number: int
    more: bool
    now: ExternalMemory

    @cached_property
    def counted(self) -> ExternalMemory:
        """Return the memory in use outside the graph: as observed in earlier runs, otherwise as of now."""
        now, seen = self.now, self._seen
        if seen is None:
            return now
        moments = (seen.most(backward=backward) for backward in (False, True))
        moment = max(moments, key=RunStart.bytes)
        held, own = moment.others, moment.own + moment.waiting
        return replace(now, held=held, own=own, parameters=moment.parameters)

    def outside(self, kept: int) -> OutsideBytes:
        """Return the bytes outside the graph in each pass, if each run of the graph keeps `kept` bytes."""
        now, seen = self.now, self._seen
        if seen is None:
            passes = now.held + now.own + now.parameters, now.kept + now.own + now.parameters + now.gradients
        else:
            passes = (
                max(seen.bytes(kept, backward=False), now.held + now.parameters),
                max(seen.bytes(kept, backward=True), now.kept + now.parameters),
            )
        always = min(passes)
        return OutsideBytes(self._base + always, *(one - always for one in passes))

    @cached_property
    def _base(self) -> int:
        """Return the bytes in use outside the graph at any time, independent of the passes."""
        return self._told + self._libraries

    @property
    def _told(self) -> int:
        """Return the outside bytes given by the options, or the optimizers' state if that is larger."""
        return max(self.options.beside, self.now.state if self._seen is None else self._seen.state)

    @property
    def _libraries(self) -> int:
        """Return the cuBLAS workspaces of the forward thread and of PyTorch's own backward thread."""
        return 2 * self.now.library

    @cached_property
    def runs(self) -> int:
        """Return the largest known number of runs of the graph that are under way at the same time."""
        return 1 + (self._seen or NO_OBSERVATIONS).runs

    def decide(self, joined: MergedGraph, step: Step) -> LimitedDecision:
        """Decide about the graph.

        If the limit is infeasible because waiting graphs were not known to be followed by others and
        therefore kept too much, recompile all of them for the next step. For this step, use the lowest
        feasible limit.

        Raises:
            PlanError: the limit is infeasible.
        """
        try:
            return self._chosen(joined, step)
        except PlanError as error:
            if error.least_bytes is not None and (unaware := self._unaware()):
                self.budget.observer.follow(unaware, self.number)
                least = replace(self.options, limit=error.least_bytes)
                with contextlib.suppress(PlanError):
                    return replace(self, options=least)._chosen(joined, step)
            raise self._refusal(error) from None

    def _unaware(self) -> list[int]:
        """Return the other waiting graphs that were decided as if no graph followed them."""
        parts = self.budget.parts
        waiting = (one for one in self.budget.observer.waiting() if one != self.number and one in parts)
        return [one for one in waiting if not parts[one].more]

    def _chosen(self, joined: MergedGraph, step: Step) -> LimitedDecision:
        """Decide within the limit of the options."""
        made, keeps = self._as_little(joined, step)
        if self.runs > 1 and len(self.budget.parts) <= 1:
            made = self._as_much(joined, step, made)
        return LimitedDecision(made, keeps, self.options.limit)

    @cached_property
    def _seen(self) -> Observations | None:
        return self.budget.observer.known.get(self.number)

    @cached_property
    def _host_bytes(self) -> int:
        """Return the host bytes left for the runs of this graph after the copies of earlier graphs."""
        return max(allowed_host_bytes(self.options) - self.budget.host_before(self.number), 0)

    def _as_little(self, joined: MergedGraph, step: Step) -> tuple[StepDecision, Callable[[int], int]]:
        """Decide with as few kept bytes as possible if the graph has later graphs or concurrent runs."""
        kept = 0
        for _ in range(_ROUNDS):
            made, keeps = self._made(joined, step, kept, least=self.more or self.runs > 1)
            if self.runs == 1 or made.kept_bytes <= kept:
                break
            kept = made.kept_bytes  # this leaves less to each run, so each run may have to keep more
        return made, keeps

    def _as_much(self, joined: MergedGraph, step: Step, found: StepDecision) -> StepDecision:
        """Let each run keep more bytes if that costs no time; for a graph that has the limit to itself."""
        low, high = found.kept_bytes, max((self._seen or NO_OBSERVATIONS).kept, found.kept_bytes)
        for _ in range(_HALVINGS):
            kept = (low + high + 1) // 2
            try:
                made, _ = self._made(joined, step, kept, least=True, keep=kept)
            except PlanError:
                high = kept
                continue
            if made.kept_bytes <= kept and made.timed.seconds <= found.timed.seconds:
                found = made
            low = kept
        return found

    def _made(
        self, joined: MergedGraph, step: Step, kept: int, *, least: bool, keep: int = 0
    ) -> tuple[StepDecision, Callable[[int], int]]:
        """Decide under the assumption that every other run keeps `kept` bytes."""
        seen = self._seen or NO_OBSERVATIONS
        terms = Constraints(
            outside=self.outside(kept),
            going=step.captured.given(self.now.going),
            gradients_stay=seen.gradients_stay,
            least=least,
            keep=keep,
            between=seen.between,
            host_limit=self._host_bytes // self.runs,
        )
        deciding = StepDecider(step, self.options, terms)
        if self.options.fused and self.options.limit is not None:
            return _fitted(joined, deciding, self.options.limit)
        return deciding.decide(), deciding.kept_bytes

    def _refusal(self, error: PlanError) -> PlanError:
        """Error for a limit that is infeasible given the memory in use outside this graph."""
        limit, least, beside = self.options.limit, error.least_bytes, self.counted
        said = [str(error)]
        if beside.held:
            said.append(f"of that, graphs before it and gradients hold {beside.held} bytes")
        if beside.held and limit is not None and least is not None:
            feasible_limit = self.budget.feasible_limit(self.number, limit, least)
            fewer = self.budget.bytes_kept_before(self.number) - self.budget.kept_within(
                self.number, feasible_limit
            )
            tickets = self.budget.tickets_before(self.number)
            least = feasible_limit + tickets
            within = f"{beside.held - fewer + tickets} at most within a limit of {least}"
            said[-1] += f", and {within}, which is enough"
        if beside.own:
            said.append(f"of that, other runs of it hold {beside.own} bytes")
        if between := (self._seen or NO_OBSERVATIONS).between:
            said.append(f"between its passes what is not compiled takes {between} bytes")
        if beside.parameters:
            said.append(f"of that, {beside.parameters} bytes are parameters that it does not read")
        if self._told:
            said.append(f"of that, {self._told} bytes lie beside, such as an optimizer's state")
        if self._libraries:
            said.append(f"of that, {self._libraries} bytes are kept by cuBLAS")
        return PlanError("; ".join(said), least)


def _fitted(
    joined: MergedGraph, deciding: StepDecider, limit: int
) -> tuple[StepDecision, Callable[[int], int]]:
    """Decide about a graph with fused operations; also return the kept bytes as a function of the limit."""
    try:
        from mempool.torch.compiled.inductor.fused import fitted

        made, looked = fitted(joined, deciding, limit)
        return made, partial(kept_by, looked)
    except PlanError:
        raise
    except Exception as error:  # the call reaches deep into a compiler that we do not control
        warnings.warn(
            f"what fused operations need is not found, and the limit counts each by itself: {error}",
            stacklevel=2,
        )
        return deciding.decide(), deciding.kept_bytes


def kept_by(looked: Sequence[StepDecision], limit: int) -> int:
    """Return the fewest bytes kept between the passes by any decision in `looked` that is within a limit.

    If no decision is within the limit, return the most bytes that any of the decisions keeps.
    """
    within = [made.kept_bytes for made in looked if made.peak_bytes <= limit]
    return min(within, default=max(made.kept_bytes for made in looked))

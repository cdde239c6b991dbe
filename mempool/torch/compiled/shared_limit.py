"""Decide about one graph under a limit that other graphs and other runs of the same graph share."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

from mempool.torch.compiled.constraints import Outside, Terms
from mempool.torch.compiled.decide import Deciding, allowed_host_bytes
from mempool.torch.compiled.runtime_observer import NOTHING_SEEN, Moment, Seen
from solvers.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mempool.torch.compiled.decision import Decided
    from mempool.torch.compiled.external_memory import Beside
    from mempool.torch.compiled.graph_budget import Budget
    from mempool.torch.compiled.merged_graph import Joined
    from mempool.torch.compiled.options import Options
    from mempool.torch.compiled.step import Step

#: Most decisions per graph while searching for one whose runs keep no more bytes than the decision assumed.
_ROUNDS = 8
#: Steps of the binary search for the bytes that each run may keep, beyond the bytes that a run must keep.
_HALVINGS = 4


class Chosen(NamedTuple):
    """A decision about a graph, the bytes kept as a function of the limit, and the limit that was used."""

    made: Decided
    keeps: Callable[[int], int]
    limit: int | None


@dataclass(frozen=True)
class Among:
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
    budget: Budget
    number: int
    more: bool
    now: Beside

    @cached_property
    def counted(self) -> Beside:
        """Return the memory in use outside the graph: as observed in earlier runs, otherwise as of now."""
        now, seen = self.now, self._seen
        if seen is None:
            return now
        moments = (seen.most(backward=backward) for backward in (False, True))
        moment = max(moments, key=Moment.bytes)
        held, own = moment.others, moment.own + moment.waiting
        return replace(now, held=held, own=own, parameters=moment.parameters)

    def outside(self, kept: int) -> Outside:
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
        return Outside(self._base + always, *(one - always for one in passes))

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
        return 1 + (self._seen or NOTHING_SEEN).runs

    def decide(self, joined: Joined, step: Step) -> Chosen:
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
                self.budget.looks.follow(unaware, self.number)
                least = replace(self.options, limit=error.least_bytes)
                with contextlib.suppress(PlanError):
                    return replace(self, options=least)._chosen(joined, step)
            raise self._refusal(error) from None

    def _unaware(self) -> list[int]:
        """Return the other waiting graphs that were decided as if no graph followed them."""
        parts = self.budget.parts
        waiting = (one for one in self.budget.looks.waiting() if one != self.number and one in parts)
        return [one for one in waiting if not parts[one].more]

    def _chosen(self, joined: Joined, step: Step) -> Chosen:
        """Decide within the limit of the options."""
        made, keeps = self._as_little(joined, step)
        if self.runs > 1 and len(self.budget.parts) <= 1:
            made = self._as_much(joined, step, made)
        return Chosen(made, keeps, self.options.limit)

    @cached_property
    def _seen(self) -> Seen | None:
        return self.budget.looks.known.get(self.number)

    @cached_property
    def _host_bytes(self) -> int:
        """Return the host bytes left for the runs of this graph after the copies of earlier graphs."""
        return max(allowed_host_bytes(self.options) - self.budget.host_before(self.number), 0)

    def _as_little(self, joined: Joined, step: Step) -> tuple[Decided, Callable[[int], int]]:
        """Decide with as few kept bytes as possible if the graph has later graphs or concurrent runs."""
        kept = 0
        for _ in range(_ROUNDS):
            made, keeps = self._made(joined, step, kept, least=self.more or self.runs > 1)
            if self.runs == 1 or made.kept_bytes <= kept:
                break
            kept = made.kept_bytes  # this leaves less to each run, so each run may have to keep more
        return made, keeps

    def _as_much(self, joined: Joined, step: Step, found: Decided) -> Decided:
        """Let each run keep more bytes if that costs no time; for a graph that has the limit to itself."""
        low, high = found.kept_bytes, max((self._seen or NOTHING_SEEN).kept, found.kept_bytes)
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
        self, joined: Joined, step: Step, kept: int, *, least: bool, keep: int = 0
    ) -> tuple[Decided, Callable[[int], int]]:
        """Decide under the assumption that every other run keeps `kept` bytes."""
        seen = self._seen or NOTHING_SEEN
        terms = Terms(
            outside=self.outside(kept),
            going=step.captured.given(self.now.going),
            gradients_stay=seen.gradients_stay,
            least=least,
            keep=keep,
            between=seen.between,
            host_limit=self._host_bytes // self.runs,
        )
        deciding = Deciding(step, self.options, terms)
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
            enough = self.budget.enough(self.number, limit, least)
            fewer = self.budget.kept_before(self.number) - self.budget.kept_within(self.number, enough)
            tickets = self.budget.tickets_before(self.number)
            least = enough + tickets
            within = f"{beside.held - fewer + tickets} at most within a limit of {least}"
            said[-1] += f", and {within}, which is enough"
        if beside.own:
            said.append(f"of that, other runs of it hold {beside.own} bytes")
        if between := (self._seen or NOTHING_SEEN).between:
            said.append(f"between its passes what is not compiled takes {between} bytes")
        if beside.parameters:
            said.append(f"of that, {beside.parameters} bytes are parameters that it does not read")
        if self._told:
            said.append(f"of that, {self._told} bytes lie beside, such as an optimizer's state")
        if self._libraries:
            said.append(f"of that, {self._libraries} bytes are kept by cuBLAS")
        return PlanError("; ".join(said), least)


def _fitted(joined: Joined, deciding: Deciding, limit: int) -> tuple[Decided, Callable[[int], int]]:
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


def kept_by(looked: Sequence[Decided], limit: int) -> int:
    """Return the fewest bytes kept between the passes by any decision in `looked` that is within a limit.

    If no decision is within the limit, return the most bytes that any of the decisions keeps.
    """
    within = [made.kept_bytes for made in looked if made.peak_bytes <= limit]
    return min(within, default=max(made.kept_bytes for made in looked))

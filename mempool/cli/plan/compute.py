"""Solving for ``mempool plan``: one set of buffers, or each variant of iterations and all jointly."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from mempool.cli.output import ExitCode, Stop, percent, progress
from mempool.units import binary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mempool.cli.inputs import Work
    from mempool.planning.plan_files import SavedPlans
    from mempool.planning.planned_pattern import PlannedPattern
    from solvers import Plan, Progress
    from traces import Buffers

#: Solvers whose plans are followed by joint planning; a user of another solver wants that solver's own
#: result.
_OWN = ("auto", "search")


@dataclass(frozen=True)
class Solved:
    """The result of a solve.

    Attributes:
        work: the input with the buffers of ``plan``; for several variants, of the one with the largest arena.
        plan: the plan of these buffers.
        saved: plans of all variants of iterations, ``plan`` first; None where there is no iteration, or no
            plan.
    """

    work: Work
    plan: Plan
    saved: SavedPlans | None = None


@dataclass(frozen=True)
class Solver:
    """A solver with its arguments.

    Attributes:
        name: name of the solver.
        seconds: time limit for everything together; None for no limit.
        nodes: as for `solvers.Stop`.
        target_bytes: as for `solvers.Stop`.
        wait_bytes: as for `solvers.packing.streams.solve_streams`.
        capacity: as for `solvers.packing.streams.solve_streams`.
        how: the solver's other arguments.
    """

    name: str
    wait_bytes: int
    capacity: int | Sequence[int] | None = None
    seconds: float | None = None
    nodes: int | None = None
    target_bytes: int | None = None
    how: dict[str, Any] = field(default_factory=dict)

    def solve(self, work: Work) -> Solved:
        """Plan all variants, and check the plans.

        Raises:
            Stop: the input cannot be planned.
            typer.BadParameter: the solver does not exist.
        """
        import solvers

        if self.name not in solvers.SOLVERS:
            raise typer.BadParameter(f"no solver {self.name!r}; there are {', '.join(solvers.SOLVERS)}")
        if work.pattern is None:
            return Solved(work, self._plan(work.buffers, self.seconds, self.nodes, self.target_bytes))
        return self._kinds(work)

    def _kinds(self, work: Work) -> Solved:
        from mempool.planning.plan_files import SavedPlans
        from mempool.planning.planned_pattern import PlannedPattern

        assert work.pattern is not None
        patterns = [work.pattern, *work.others]
        together = len(patterns) > 1 and self.name in _OWN
        share = math.inf if self.seconds is None else self.seconds / (len(patterns) + together)
        made: list[PlannedPattern] = []
        interrupted = False
        for number, pattern in enumerate(patterns, 1):
            which = f"kind {number} of {len(patterns)}, " if work.others else ""
            seconds = None if self.seconds is None else share
            # A variant needs no better plan than the largest arena so far.
            target = max((planned.plan.arena_bytes for planned in made), default=self.target_bytes)
            plan = self._plan(pattern.buffers, seconds, 0 if interrupted else self.nodes, target, which)
            if plan.offset is None:
                return Solved(dataclasses.replace(work, pattern=pattern, buffers=pattern.buffers), plan)
            interrupted = interrupted or plan.stopped_by == "interrupt"
            made.append(PlannedPattern(pattern, pattern.buffers, plan))
        saved, plans = SavedPlans(made), [planned.plan for planned in made]
        if together and not interrupted and (joint := self._together(made, share)) is not None:
            saved = joint
            plans.append(joint.plans[0].plan)  # all variants share the search of this plan
        first = max(saved.plans, key=lambda planned: planned.plan.arena_bytes)
        plan = dataclasses.replace(
            first.plan,
            lower_bound_bytes=max(first.plan.lower_bound_bytes, min(_load(saved), first.plan.arena_bytes)),
            seconds=sum(one.seconds for one in plans),
            nodes=sum(one.nodes for one in plans),
            stopped_by="interrupt" if interrupted else first.plan.stopped_by,
        )
        work = dataclasses.replace(work, pattern=first.pattern, buffers=first.buffers)
        return Solved(work, plan, with_first(saved, first))

    def _together(self, made: Sequence[PlannedPattern], seconds: float) -> SavedPlans | None:
        """Plan all variants jointly, for any order: buffers that one leaves alive collide with no other's."""
        from mempool.planning.joint_planning import plan_jointly

        with progress(f"planning {len(made)} kinds of iterations together; Ctrl-C keeps them apart"):
            until = time.monotonic() + seconds
            try:
                saved = plan_jointly(
                    made, wait_bytes=self.wait_bytes, interrupt=lambda: time.monotonic() > until
                )
            except KeyboardInterrupt:
                return None
        if saved is None or max(one.plan.arena_bytes for one in saved.plans) > self._fits():
            return None
        if time.monotonic() <= until:
            return saved
        return dataclasses.replace(saved, plans=[_out_of_time(planned) for planned in saved.plans])

    def _fits(self) -> float:
        """Return the capacity as the largest allowed arena; infinite without a single capacity."""
        return self.capacity if isinstance(self.capacity, int) else math.inf

    def _plan(
        self, buffers: Buffers, seconds: float | None, nodes: int | None, target: int | None, which: str = ""
    ) -> Plan:
        import solvers
        from solvers.packing.streams import solve_streams

        stop = solvers.Stop(seconds=seconds, nodes=nodes, target_bytes=target)
        with progress(f"planning {which}{len(buffers):,} buffers; Ctrl-C keeps the best plan") as show:
            try:
                found = solve_streams(
                    buffers,
                    solver=self.name,
                    stop=stop,
                    wait_bytes=self.wait_bytes,
                    capacity=self.capacity,
                    on_progress=lambda far: show(_line(far)),
                    **self.how,
                )
            except ModuleNotFoundError as error:
                raise Stop(
                    ExitCode.FAILED, f"solver {self.name!r} needs {error.name}, which is not installed"
                ) from None
            except ValueError as error:
                raise Stop(ExitCode.FILE, f"cannot be planned: {error}") from None
        if found.offset is not None:
            try:
                solvers.check(found, buffers)
            except solvers.PlanError as error:
                raise Stop(
                    ExitCode.FAILED, f"the solver made a wrong plan, which is not written: {error}"
                ) from None
        return found


def _out_of_time(planned: PlannedPattern) -> PlannedPattern:
    """Mark an interrupted plan as stopped by the clock, as the search itself would have done."""
    if planned.plan.stopped_by != "interrupt":
        return planned
    return dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, stopped_by="time"))


def _load(saved: SavedPlans) -> int:
    """Return the most bytes alive in any succession of the jointly planned variants, a lower bound."""
    from solvers import peak_load
    from solvers.packing.variants import VariantSet

    return peak_load(VariantSet(list(saved.variants.values())).buffers) if saved.variants else 0


def with_first(saved: SavedPlans, first: PlannedPattern) -> SavedPlans:
    """Return the saved plans with this plan in front, the one that other tools take."""
    from mempool.planning.plan_files import SavedPlans

    order = sorted(range(len(saved.plans)), key=lambda number: saved.plans[number] is not first)
    places = {number: place for place, number in enumerate(order)}
    kinds = {places[number]: kind for number, kind in saved.variants.items()}
    return SavedPlans([saved.plans[number] for number in order], kinds)


def _line(far: Progress) -> str:
    """Describe the progress of the search, in the width of most terminals."""
    best = "no plan" if far.arena_bytes is None else f"arena {binary(far.arena_bytes)}"
    gap = "" if far.gap is None else f", gap {percent(far.gap)}"
    millions = far.nodes / 1e6
    speed = f"{millions / far.seconds:.1f} M/s, {far.seconds:.0f} s" if far.seconds else "0 s"
    return f"{best}, bound {binary(far.lower_bound_bytes)}{gap}, {millions:.1f} M nodes, {speed}"


def write(solved: Solved, output: Path) -> None:
    """Write the plan, or the plans of all variants; a name in .csv makes a MiniMalloc CSV."""
    work, plan = solved.work, solved.plan
    assert plan.offset is not None
    if output.suffix == ".csv":
        from traces.formats.minimalloc import write_csv

        write_csv(work.buffers, output, offsets=plan.offset[:, 0])
    elif solved.saved is not None:
        from mempool.planning.plan_files import write_plans

        client = "" if work.trace is None else work.trace.metadata.get("client", "")
        write_plans(solved.saved, output, client=client)
    else:
        from solvers import write_plan

        write_plan(plan, work.buffers, output)

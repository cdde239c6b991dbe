"""``mempool check``: does a plan hold for a trace?"""

from __future__ import annotations

import dataclasses
from pathlib import Path  # noqa: TC003 - typer reads it from the signature
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from mempool.cli.options import Device, Lenient  # noqa: TC001 - typer reads them from the signature
from mempool.cli.output import ExitCode, Stop, facts, percent, print_json
from mempool.report import binary

if TYPE_CHECKING:
    from mempool.cli.work import Work
    from solvers import Plan
    from traces import Buffers


def check(
    plan: Annotated[Path, typer.Argument(help="A plan (Parquet), or a MiniMalloc CSV with offsets.")],
    trace: Annotated[Path, typer.Argument(help="The trace or CSV that it was made for.")],
    *,
    device: Device = None,
    lenient: Lenient = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check that a plan holds for a trace: no two buffers alive together overlap, and all else it claims.

    The check shares no code with the solvers. Exit code 0: the plan holds; 1:
    it does not.

    For example:

        mempool check run.plan run.trace
        mempool check solved.csv buffers.csv --json
    """
    from mempool.cli.work import read_work
    from solvers import PlanError
    from solvers import check as judge

    solved = read_work(plan)
    if solved.plan is None:
        raise Stop(ExitCode.FILE, f"{plan}: a {solved.kind} without offsets, not a plan")
    given = read_work(
        trace, whole=solved.plan.period is None, lenient=lenient, device=device, several="refuse"
    )
    if given.kind == "plan":
        raise Stop(ExitCode.FILE, f"{trace}: a plan, not a trace")
    reason = None
    try:
        judge(*matched(solved.plan, solved.buffers, given))
    except PlanError as error:
        reason = str(error)
    if json:
        print_json(
            {
                "ok": reason is None,
                "reason": reason,
                "buffers": len(given.buffers),
                "arena_bytes": solved.plan.arena_bytes,
                "lower_bound_bytes": solved.plan.lower_bound_bytes,
                "ratio": 1 + solved.plan.gap,
                "skipped": given.skipped,
            }
        )
    if reason is not None:
        raise Stop(ExitCode.NEGATIVE, f"{plan}: {reason}")
    if not json:
        arena = f"{binary(solved.plan.arena_bytes)}, {percent(solved.plan.gap)} above the lower bound"
        facts("the plan holds", [("buffers", f"{len(given.buffers):,}"), ("arena", arena)])


def matched(plan: Plan, planned: Buffers, given: Work) -> tuple[Plan, Buffers]:
    """The plan with its rows in the order of the trace's buffers, and those as the plan must serve them.

    Raises:
        PlanError: the plan is for another trace.
    """
    from solvers import PlanError

    buffers = given.buffers
    if plan.period != buffers.period:
        raise PlanError(f"a plan for another trace: {_called(plan.period)}, not {_called(buffers.period)}")
    if len(planned) != len(buffers):
        raise PlanError(f"a plan for another trace: {len(planned)} buffers, not {len(buffers)}")
    if planned.ids is not None and buffers.ids is not None:
        rows = _rows(planned.ids, buffers.ids)
        planned = planned.select(rows)
        assert plan.offset is not None
        plan = dataclasses.replace(plan, offset=plan.offset[rows])
    for name in ("size", "start", "end", "persistent"):
        theirs, ours = getattr(planned, name), getattr(buffers, name)
        if wrong := np.flatnonzero(theirs != ours).tolist():
            row = wrong[0]
            called = str(row) if buffers.ids is None else buffers.ids[row]
            raise PlanError(
                f"a plan for another trace: {name} of buffer {called} is {ours[row]}, not {theirs[row]}"
            )
    # A plan may keep a stricter alignment than its trace asks for; then it is held to that.
    return plan, dataclasses.replace(buffers, alignment=np.maximum(buffers.alignment, planned.alignment))


def _called(period: int | None) -> str:
    return "a linear trace" if period is None else f"a trace of period {period}"


def _rows(planned: tuple[str, ...], wanted: tuple[str, ...]) -> list[int]:
    from solvers import PlanError

    where = {name: row for row, name in enumerate(planned)}
    if missing := [name for name in wanted if name not in where]:
        raise PlanError(f"a plan for another trace: no buffer {missing[0]}")
    return [where[name] for name in wanted]

"""``mempool check``: verify that a plan holds for a trace."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path  # noqa: TC003 - typer reads it from the signature
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from mempool.cli.options import Device, Lenient  # noqa: TC001 - typer reads them from the signature
from mempool.cli.output import ExitCode, Stop, facts, percent, print_json
from mempool.units import binary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mempool.cli.inputs import Work
    from solvers import Plan
    from solvers.packing.variants import IterationVariant
    from traces import Buffers, Trace
    from traces.iterations.pattern import Pattern


def check(
    plan: Annotated[Path, typer.Argument(help="A plan (Parquet), or a MiniMalloc CSV with offsets.")],
    trace: Annotated[Path, typer.Argument(help="The trace or CSV that it was made for.")],
    *,
    device: Device = None,
    lenient: Lenient = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check that a plan holds for a trace: no two live buffers overlap, and all else the plan claims is true.

    The check shares no code with the solvers. Exit code 0: the plan holds; 1:
    the plan does not hold.

    For example:

        mempool check run.plan run.trace
        mempool check solved.csv buffers.csv --json
    """
    from mempool.cli.inputs import read_work
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
    reason, kinds = None, 0
    try:
        parts = matching(plan, solved, given)
        kinds = len(parts)
        for part in parts:
            judge(*part)
    except PlanError as error:
        reason = str(error)
    if json:
        print_json(
            {
                "ok": reason is None,
                "reason": reason,
                "buffers": len(solved.buffers),
                "kinds": kinds if solved.plan.period is not None else None,
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
        rows = [("buffers", f"{len(solved.buffers):,}"), ("arena", arena)]
        if kinds > 1:
            rows.append(("kinds", f"{kinds} of iterations"))
        facts("the plan holds", rows)


def _all_kinds(trace: Trace) -> Iterator[Pattern]:
    """Yield every variant of the iterations, also within envelopes, by user marks and automatic marks."""
    from traces.iterations.pattern import find_patterns

    for found in (False, True):
        yield from find_patterns(trace, anywhere=True, found=found)


def matching(path: Path, solved: Work, given: Work) -> list[tuple[Plan, Buffers]]:
    """Return each plan of a file, one per variant of iterations, with the buffers that the plan must serve.

    Raises:
        PlanError: a plan belongs to another trace, or is wrong.
        TraceError: the file is damaged.
    """
    from mempool.planning.plan_files import OTHER, read_plans
    from solvers import read_plan_columns

    assert solved.plan is not None
    if solved.kind != "plan" or not any(name.startswith(OTHER) for name in read_plan_columns(path)):
        return [matched(solved.plan, solved.buffers, _of_its_kind(given, solved.buffers))]
    saved = read_plans(path)  # also checks the plans that were made jointly
    keys = [saved.plans[number].key for number in saved.variants]
    parts = []
    for number, planned in enumerate(saved.plans):
        mine = _of_its_kind(given, planned.buffers)
        if number in saved.variants and mine.pattern is not None:
            _check_lifetimes(saved.variants[number], keys, planned.buffers, mine.pattern)
            alignment = np.maximum(planned.buffers.alignment, mine.buffers.alignment)
            parts.append((planned.plan, dataclasses.replace(planned.buffers, alignment=alignment)))
        else:
            parts.append(matched(planned.plan, planned.buffers, mine))
    return parts


def _of_its_kind(given: Work, planned: Buffers) -> Work:
    """Return the work with the buffers of the variant that was planned."""
    if given.pattern is None or given.trace is None:
        return given
    for pattern in itertools.chain((given.pattern, *given.others), _all_kinds(given.trace)):
        if np.array_equal(pattern.buffers.size, planned.size):
            alignment = np.full(len(planned), int(given.buffers.alignment.max(initial=1)), np.int64)
            buffers = dataclasses.replace(pattern.buffers, alignment=alignment)
            return dataclasses.replace(given, pattern=pattern, buffers=buffers)
    return given


def _check_lifetimes(kind: IterationVariant, keys: list[bytes], planned: Buffers, pattern: Pattern) -> None:
    """Check that a variant was planned for lifetimes as long as the trace's, whichever variant follows."""
    from solvers import PlanError

    if not np.array_equal(pattern.buffers.size, planned.size):
        raise PlanError(f"a plan for another trace: no iteration has the {len(planned)} buffers of a kind")
    longer = (pattern.buffers.end > kind.buffers.end) | pattern.buffers.persistent
    for column, key in enumerate(keys):
        if key in pattern.reach:
            longer |= pattern.reach[key] > kind.reach[:, column]
    if wrong := np.flatnonzero(longer & ~planned.persistent).tolist():
        raise PlanError(f"a plan for another trace: buffer {wrong[0]} of a kind lives longer than planned")


def matched(plan: Plan, planned: Buffers, given: Work) -> tuple[Plan, Buffers]:
    """Return the plan in the order of the trace's buffers, and the buffers as the plan must serve them.

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
    # A plan may keep a stricter alignment than the trace asks for; the check then uses the stricter one.
    return plan, dataclasses.replace(buffers, alignment=np.maximum(buffers.alignment, planned.alignment))


def _called(period: int | None) -> str:
    return "a linear trace" if period is None else f"a trace of period {period}"


def _rows(planned: tuple[str, ...], wanted: tuple[str, ...]) -> list[int]:
    from solvers import PlanError

    where = {name: row for row, name in enumerate(planned)}
    if missing := [name for name in wanted if name not in where]:
        raise PlanError(f"a plan for another trace: no buffer {missing[0]}")
    return [where[name] for name in wanted]

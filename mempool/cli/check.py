"""``mempool check``: verify that a plan holds for a trace."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path  # noqa: TC003 - typer reads it from the signature
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from mempool.cli.options import Device, Json, Lenient  # noqa: TC001 - typer reads them from the signature
from mempool.cli.output import ExitCode, Stop, facts, percent, print_json
from mempool.units import binary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mempool.offline import InputFile
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
    json: Json = False,
) -> None:
    """Check that a plan holds for a trace: no two live buffers overlap, and all else the plan claims is true.

    The check shares no code with the solvers. Exit code 0: the plan holds; 1:
    the plan does not hold.

    For example:

        mempool check run.plan run.trace
        mempool check solved.csv buffers.csv --json
    """
    from mempool.cli.inputs import read_file
    from solvers import PlanError
    from solvers import check as check_plan

    solved = read_file(plan)
    if solved.plan is None:
        raise Stop(ExitCode.FILE, f"{plan}: a {solved.format} without offsets, not a plan")
    given = read_file(
        trace, whole=solved.plan.period is None, lenient=lenient, device=device, several_devices="refuse"
    )
    if given.format == "plan":
        raise Stop(ExitCode.FILE, f"{trace}: a plan, not a trace")
    reason, variants = None, 0
    try:
        plans = matching_plans(plan, solved, given)
        variants = len(plans)
        for part in plans:
            check_plan(*part)
    except PlanError as error:
        reason = str(error)
    if json:
        print_json(
            {
                "ok": reason is None,
                "reason": reason,
                "buffers": len(solved.buffers),
                "variants": variants if solved.plan.period is not None else None,
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
        if variants > 1:
            rows.append(("variants", f"{variants} of iterations"))
        facts("the plan holds", rows)


def _all_variants(trace: Trace) -> Iterator[Pattern]:
    """Yield all variants of the iterations, also within envelopes, by user marks and automatic marks."""
    from traces.iterations.pattern import find_patterns

    for automatic_marks in (False, True):
        yield from find_patterns(trace, anywhere=True, automatic_marks=automatic_marks)


def matching_plans(path: Path, solved: InputFile, given: InputFile) -> list[tuple[Plan, Buffers]]:
    """Return each plan of a file, one per variant, with the buffers that the plan must serve.

    Raises:
        PlanError: a plan belongs to another trace, or is wrong.
        TraceError: the file is damaged.
    """
    from mempool.planning.plan_files import OTHER, read_plans
    from solvers import read_plan_columns

    assert solved.plan is not None
    if solved.format != "plan" or not any(name.startswith(OTHER) for name in read_plan_columns(path)):
        return [_matching_plan(solved.plan, solved.buffers, _with_variant(given, solved.buffers))]
    saved = read_plans(path)  # also checks joint plans
    keys = [saved.plans[number].key for number in saved.variants]
    plans = []
    for number, planned in enumerate(saved.plans):
        variant = _with_variant(given, planned.buffers)
        if number in saved.variants and variant.pattern is not None:
            _check_lifetimes(saved.variants[number], keys, planned.buffers, variant.pattern)
            alignment = np.maximum(planned.buffers.alignment, variant.buffers.alignment)
            plans.append((planned.plan, dataclasses.replace(planned.buffers, alignment=alignment)))
        else:
            plans.append(_matching_plan(planned.plan, planned.buffers, variant))
    return plans


def _with_variant(given: InputFile, planned: Buffers) -> InputFile:
    """Return the input with the buffers of the variant that was planned."""
    from mempool.offline import with_alignment

    if given.pattern is None or given.trace is None:
        return given
    for pattern in itertools.chain(given.variants, _all_variants(given.trace)):
        if np.array_equal(pattern.buffers.size, planned.size):
            buffers = with_alignment(pattern.buffers, int(given.buffers.alignment.max(initial=1)))
            return dataclasses.replace(given, pattern=pattern, buffers=buffers)
    return given


def _check_lifetimes(
    variant: IterationVariant, keys: list[bytes], planned: Buffers, pattern: Pattern
) -> None:
    """Check that a variant's planned lifetimes cover the trace's lifetimes for any following variant."""
    from solvers import PlanError

    if not np.array_equal(pattern.buffers.size, planned.size):
        raise PlanError(f"a plan for another trace: no iteration has the {len(planned)} buffers of a variant")
    longer = (pattern.buffers.end > variant.buffers.end) | pattern.buffers.persistent
    for column, key in enumerate(keys):
        if key in pattern.reach:
            longer |= pattern.reach[key] > variant.reach[:, column]
    if wrong := np.flatnonzero(longer & ~planned.persistent).tolist():
        raise PlanError(f"a plan for another trace: buffer {wrong[0]} of a variant lives longer than planned")


def _matching_plan(plan: Plan, planned: Buffers, given: InputFile) -> tuple[Plan, Buffers]:
    """Return the plan in the order of the trace's buffers, and the buffers that the plan must serve.

    Raises:
        PlanError: the plan is for another trace.
    """
    from solvers import PlanError

    buffers = given.buffers
    if plan.period != buffers.period:
        raise PlanError(
            f"a plan for another trace: {_timeline(plan.period)}, not {_timeline(buffers.period)}"
        )
    if len(planned) != len(buffers):
        raise PlanError(f"a plan for another trace: {len(planned)} buffers, not {len(buffers)}")
    if planned.ids is not None and buffers.ids is not None:
        rows = _rows(planned.ids, buffers.ids)
        planned = planned.select(rows)
        assert plan.offset is not None
        plan = dataclasses.replace(plan, offset=plan.offset[rows])
    for name in ("size", "start", "end", "persistent"):
        of_plan, of_trace = getattr(planned, name), getattr(buffers, name)
        if wrong := np.flatnonzero(of_plan != of_trace).tolist():
            row = wrong[0]
            raise PlanError(
                f"a plan for another trace: {name} of buffer {buffers.name(row)} is {of_trace[row]}, "
                f"not {of_plan[row]}"
            )
    # A plan may have a stricter alignment than the trace, which the check then uses.
    return plan, dataclasses.replace(buffers, alignment=np.maximum(buffers.alignment, planned.alignment))


def _timeline(period: int | None) -> str:
    return "a linear trace" if period is None else f"a trace of period {period}"


def _rows(planned: tuple[str, ...], wanted: tuple[str, ...]) -> list[int]:
    from solvers import PlanError

    rows = {name: row for row, name in enumerate(planned)}
    if missing := [name for name in wanted if name not in rows]:
        raise PlanError(f"a plan for another trace: no buffer {missing[0]}")
    return [rows[name] for name in wanted]

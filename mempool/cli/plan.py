"""``mempool plan``: compute offsets for the buffers of a trace."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path  # noqa: TC003 - typer reads it from the signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mempool.cli.options import Device, Json, Lenient, completion, parsed
from mempool.cli.output import ExitCode, Stop, facts, percent, print_json, progress, require_writable
from mempool.cli.output_files import overwritten_file
from mempool.cli.variants import (
    describe_iterations,
    describe_rejected,
    print_variants,
    variant_answer,
)
from mempool.units import binary

if TYPE_CHECKING:
    from mempool.offline import InputFile, OfflinePlanner, PlannedInput
    from mempool.planning.plan_files import SavedPlans
    from solvers import Plan, Progress


def plan(
    trace: Annotated[
        Path,
        typer.Argument(
            help="A trace, a snapshot of PyTorch, a trace of its profiler, a log of RMM, lines of CuPy's "
            "DebugPrintHook, or buffers (MiniMalloc CSV), recognized by content."
        ),
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the plan here; a name in .csv makes a MiniMalloc CSV."),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Plan the file as one, not the iteration that it repeats.")
    ] = False,
    solver: Annotated[
        str,
        typer.Option(
            autocompletion=completion("auto", "greedy"),
            help="auto, or greedy: auto without the complete searches.",
        ),
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    time_limit: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Stop by the clock; such a plan is not reproducible."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="How many search at once; all cores with a time limit only, else one."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=0, help="Stop after so much work; reproducible.")] = None,
    capacity: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The first plan that fits is enough: 4096, 512M, 1.5GiB, 2GB."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE|PERCENT", help="An arena that is small enough: 2GiB, or 0.1% above the bound."
        ),
    ] = None,
    alignment: Annotated[
        int,
        typer.Option(
            min=1, max=2**40, metavar="BYTES", help="Align the buffers of a trace to a power of two."
        ),
    ] = 1,
    wait_bytes: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="What must be saved for each wait of one stream for another in an iteration, or never; "
            "with --whole streams share nothing.",
        ),
    ] = "1MiB",
    device: Device = None,
    lenient: Lenient = False,
    json: Json = False,
) -> None:
    """Give every buffer of a trace an offset, in an arena as small as possible.

    If a trace repeats an iteration, that iteration is planned; if the marks
    distinguish several variants of iterations, such as batches of a few lengths,
    each variant is planned, in one arena. The plan is checked by independent code
    before the plan is written. Ctrl-C writes the best plan so far.

    For example:

        mempool plan run.trace -o run.plan
        mempool plan buffers.csv -o solved.csv --time-limit 10
        mempool plan run.trace --target 0.1%
        mempool plan run.trace --whole --capacity 2GiB --json
    """
    from mempool.cli.inputs import read_file, require_history
    from mempool.errors import UsageError
    from mempool.offline import OfflinePlanner
    from mempool.settings import wait_price
    from mempool.units import parse_bytes

    times, target_bytes = parsed("--target", _parse_target, target) or (None, None)
    price = parsed("--wait-bytes", wait_price, wait_bytes)
    assert price is not None
    _check_output(output, trace)
    try:
        planner = OfflinePlanner(
            solver=solver,
            wait_bytes=price,
            capacity=parsed("--capacity", parse_bytes, capacity),
            seconds=time_limit,
            nodes=nodes,
            target_bytes=target_bytes,
            solver_options={"seed": seed, "threads": threads, "close_enough": times},
        )
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    if time_limit is not None and math.isnan(time_limit):
        raise typer.BadParameter("nan is no limit", param_hint="--time-limit")
    if alignment & (alignment - 1):
        raise typer.BadParameter(f"alignment {alignment} is not a power of two")
    given = read_file(
        trace,
        whole=whole,
        main_only=True,
        alignment=alignment,
        lenient=lenient,
        device=device,
        several_devices="refuse",
    )
    if given.format == "plan":
        raise Stop(ExitCode.FILE, f"{trace}: a plan already; plans are made from traces")
    require_history(trace, given)
    _check_fits(output, given)
    planned = _planned(planner, given)
    if output is not None and planned.plan.offset is not None:
        planned.write(output)
    if json:
        print_json(answer(planned))
    else:
        _print(planned, output)
    _check_result(planned.plan, output)


def _planned(planner: OfflinePlanner, given: InputFile) -> PlannedInput:
    """Plan an input with a line of progress on the terminal."""
    from mempool.errors import MempoolError

    with progress("planning") as show:
        try:
            return planner.plan(given, on_stage=show, on_progress=lambda state: show(_progress_line(state)))
        except MempoolError as error:
            raise Stop(ExitCode.FAILED, str(error)) from None


def _progress_line(state: Progress) -> str:
    """Describe the progress of the search in one line of a terminal."""
    best = "no plan" if state.arena_bytes is None else f"arena {binary(state.arena_bytes)}"
    gap = "" if state.gap is None else f", gap {percent(state.gap)}"
    millions = state.nodes / 1e6
    speed = f"{millions / state.seconds:.1f} M/s, {state.seconds:.0f} s" if state.seconds else "0 s"
    return f"{best}, bound {binary(state.lower_bound_bytes)}{gap}, {millions:.1f} M nodes, {speed}"


def _check_result(found: Plan, output: Path | None) -> None:
    """End the verb with an error for a missing plan or an interrupted search."""
    if found.offset is None:
        raise Stop(ExitCode.NEGATIVE, f"{found.status}: {found.reason}")
    if found.stopped_by == "interrupt":
        kept = "" if output is None else f"; {output} holds the best plan so far"
        raise Stop(ExitCode.INTERRUPTED, f"interrupted{kept}")


def answer(planned: PlannedInput) -> dict[str, Any]:
    """Return the keys of ``mempool plan --json``."""
    from solvers import peak_load
    from solvers.packing.streams import waits

    plan, given = planned.plan, planned.given
    solved = plan.offset is not None
    peak = peak_load(given.buffers)
    return {
        "status": str(plan.status),
        "arena_bytes": plan.arena_bytes if solved else None,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "peak_load_bytes": peak,
        "ratio": 1 + plan.gap if solved else None,
        "fragmentation": plan.fragmentation(peak) if solved else None,
        "solver": plan.solver,
        "seed": plan.seed,
        "seconds": plan.seconds,
        "nodes": plan.nodes,
        "stopped_by": plan.stopped_by,
        "buffers": len(given.buffers),
        "persistent_buffers": int(given.buffers.persistent.sum()),
        "period": plan.period,
        "stream_waits": waits(plan, given.buffers) if solved else None,
        "iterations": 1 if given.pattern is None else given.pattern.iterations,
        "variants": None if planned.saved is None else _variants(planned.saved),
        "reason": plan.reason or None,
        "skipped": given.skipped,
    }


def _variants(saved: SavedPlans) -> list[dict[str, Any]]:
    return [
        variant_answer(variant.pattern, variant.buffers) | {"arena_bytes": variant.plan.arena_bytes}
        for variant in saved.plans
    ]


def _parse_target(text: str) -> tuple[Fraction | None, int | None]:
    """Return the target in bytes, or as an exact multiple of the lower bound for "0.1%"."""
    from mempool.units import parse_bytes

    if percentage := re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*%\s*", text):
        return 1 + Fraction(percentage[1]) / 100, None
    return None, parse_bytes(text)


def _check_output(output: Path | None, trace: Path) -> None:
    """Refuse an unwritable output before a long search."""
    if output is None:
        return
    if overwritten_file([trace], [output]) is not None:
        raise typer.BadParameter("the plan would overwrite the trace")
    require_writable(output)


def _check_fits(output: Path | None, given: InputFile) -> None:
    grouped = (given.buffers.group != given.buffers.group[:1]).any()
    if output is not None and output.suffix == ".csv" and (given.buffers.period is not None or grouped):
        raise typer.BadParameter(
            "a CSV holds neither iterations nor streams; use --whole, or another name than .csv"
        )


def _print(planned: PlannedInput, output: Path | None) -> None:
    plan, given, values = planned.plan, planned.given, answer(planned)
    variants = values["variants"] or ()
    rows = [
        ("status", f"{plan.status}, by {plan.solver} (stopped by {plan.stopped_by or '-'})"),
        ("buffers", _buffers_text(given, len(variants))),
        ("peak load", binary(values["peak_load_bytes"])),
        ("lower bound", binary(plan.lower_bound_bytes)),
    ]
    if plan.offset is not None:
        rows += [
            ("arena", f"{binary(plan.arena_bytes)}, {percent(plan.gap)} above the lower bound"),
            ("fragmentation", percent(values["fragmentation"])),
        ]
    if values["stream_waits"]:
        rows.append(("waits", f"{values['stream_waits']:g} of one stream for another in an iteration"))
    rows += [("seconds", f"{plan.seconds:.3f}"), ("nodes", f"{plan.nodes:,}")]
    if output is not None and plan.offset is not None:
        rows.append(("written", str(output)))
        if given.format == "trace" and planned.saved is None and output.suffix != ".csv":
            rows.append(
                (
                    "replayed",
                    "by no pool: it is not for an iteration; pool.save() writes such plans",
                )
            )
    facts("plan", rows)
    if len(variants) > 1:
        print_variants(variants)


def _buffers_text(given: InputFile, variants: int) -> str:
    """Describe the number of planned buffers, and their part of the file."""
    if given.pattern is not None:
        text = f"{len(given.buffers):,} of one iteration, of {describe_iterations(given.pattern)}"
        if variants > 1:
            text += f", the largest of {variants} variants"
    else:
        text = f"{len(given.buffers):,}" + (", the trace as one" if given.format == "trace" else "")
    return text if given.rejected_pattern is None else f"{text}; {describe_rejected(given.rejected_pattern)}"

"""``mempool plan``: compute offsets for the buffers of a trace."""

from __future__ import annotations

import dataclasses
import math
import re
from fractions import Fraction
from pathlib import Path  # noqa: TC003 - typer reads it from the signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mempool.cli import variants
from mempool.cli.main_loop import passed_over
from mempool.cli.options import Device, Lenient  # noqa: TC001 - typer reads them from the signature
from mempool.cli.output import ExitCode, Stop, bar, facts, percent, print_json
from mempool.cli.output_files import why_not, written_over
from mempool.cli.parsing import parsed
from mempool.cli.plan.compute import Solver, write
from mempool.units import binary

if TYPE_CHECKING:
    from mempool.cli.inputs import Work
    from mempool.cli.plan.compute import Solved
    from mempool.planning.plan_files import SavedPlans


def _solvers(incomplete: str) -> list[str]:
    from solvers import SOLVERS

    return [name for name in SOLVERS if name.startswith(incomplete)]


def plan(
    trace: Annotated[
        Path,
        typer.Argument(
            help="A trace, a snapshot of PyTorch, a trace of its profiler, a log of RMM, lines of CuPy's "
            "DebugPrintHook, or buffers (MiniMalloc CSV), told by content."
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
            autocompletion=_solvers,
            help="auto, search, greedy or exact; to compare with what others do: first_fit, best_fit, "
            "smartpool, greedy_by_size, best_fit_in_time, skyline_lifetime, skyline_size, skyline_area.",
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
        list[str] | None,
        typer.Option(
            metavar="SIZE",
            help="The first plan that fits is enough: 4096, 512M, 1.5GiB, 2GB. Given again: another arena.",
        ),
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
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Give every buffer of a trace an offset, in an arena as small as possible.

    If a trace repeats an iteration, that iteration is planned; if the marks
    distinguish several kinds of iterations, such as batches of a few lengths,
    each kind is planned, in one arena. The plan is checked by independent code
    before the plan is written. Ctrl-C writes the best plan so far.

    For example:

        mempool plan run.trace -o run.plan
        mempool plan buffers.csv -o solved.csv --time-limit 10
        mempool plan run.trace --target 0.1%
        mempool plan run.trace --whole --capacity 2GiB --json
        mempool plan run.trace --capacity 8GiB --capacity 4GiB
    """
    from mempool.cli.inputs import read_work, require_history
    from mempool.settings import wait_price
    from mempool.units import parse_bytes

    sizes = tuple(parsed("--capacity", parse_bytes, one) or 0 for one in capacity or ())
    times, target_bytes = parsed("--target", _parse_target, target) or (None, None)
    price = parsed("--wait-bytes", wait_price, wait_bytes)
    _check_output(output, trace)
    _check_arenas(sizes, solver, output)
    if time_limit is not None and math.isnan(time_limit):
        raise typer.BadParameter("nan is no limit", param_hint="--time-limit")
    if alignment & (alignment - 1):
        raise typer.BadParameter(f"alignment {alignment} is not a power of two")
    with bar(f"reading {trace}") as told:
        work = read_work(
            trace,
            whole=whole,
            main=True,
            alignment=alignment,
            lenient=lenient,
            device=device,
            several="refuse",
            progress=told,
        )
    if work.kind == "plan":
        raise Stop(ExitCode.FILE, f"{trace}: a plan already; plans are made from traces")
    require_history(trace, work)
    _check_fits(output, work)
    if len(sizes) > 1:  # a pool, which replays several variants, has one arena
        work = dataclasses.replace(work, others=())
    assert price is not None
    solved = Solver(
        solver,
        price,
        sizes if len(sizes) > 1 else next(iter(sizes), None),
        time_limit,
        nodes,
        target_bytes,
        {"seed": seed, "threads": threads, "close_enough": times},
    ).solve(work)
    found = solved.plan
    if output is not None and found.offset is not None:
        write(solved, output)
    if json:
        print_json(answer(solved))
    else:
        _show(solved, output)
    if found.offset is None:
        raise Stop(ExitCode.NEGATIVE, f"{found.status}: {found.reason}")
    if found.stopped_by == "interrupt":
        kept = "" if output is None else f"; {output} holds the best plan so far"
        raise Stop(ExitCode.INTERRUPTED, f"interrupted{kept}")


def answer(solved: Solved) -> dict[str, Any]:
    """Return the keys of ``mempool plan --json``."""
    from mempool.cli.inputs import arenas
    from solvers import peak_load
    from solvers.packing.streams import waits

    found, work = solved.plan, solved.work
    there = found.offset is not None
    peak = peak_load(work.buffers)
    return {
        "status": str(found.status),
        "arena_bytes": found.arena_bytes if there else None,
        "arenas": arenas(found, work.buffers),
        "lower_bound_bytes": found.lower_bound_bytes,
        "peak_load_bytes": peak,
        "ratio": 1 + found.gap if there else None,
        "fragmentation": found.fragmentation(peak) if there else None,
        "solver": found.solver,
        "seed": found.seed,
        "seconds": found.seconds,
        "nodes": found.nodes,
        "stopped_by": found.stopped_by,
        "buffers": len(work.buffers),
        "persistent_buffers": int(work.buffers.persistent.sum()),
        "period": found.period,
        "stream_waits": waits(found, work.buffers) if there else None,
        "iterations": 1 if work.pattern is None else work.pattern.iterations,
        "kinds": None if solved.saved is None else _kinds(solved.saved),
        "reason": found.reason or None,
        "skipped": work.skipped,
    }


def _kinds(saved: SavedPlans) -> list[dict[str, Any]]:
    return [
        variants.answer(one.pattern, one.buffers) | {"arena_bytes": one.plan.arena_bytes}
        for one in saved.plans
    ]


def _parse_target(text: str) -> tuple[Fraction | None, int | None]:
    """Return the target as a multiple of the lower bound or in bytes; the multiple is exact, for "0.1%"."""
    from mempool.units import parse_bytes

    if percentage := re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*%\s*", text):
        return 1 + Fraction(percentage[1]) / 100, None
    return None, parse_bytes(text)


def _check_output(output: Path | None, trace: Path) -> None:
    """Refuse an unwritable output before a long search."""
    if output is None:
        return
    if written_over([trace], [output]) is not None:
        raise typer.BadParameter("the plan would overwrite the trace")
    if reason := why_not(output):
        raise Stop(ExitCode.FILE, f"{output}: {reason}")


def _check_arenas(capacities: tuple[int, ...], solver: str, output: Path | None) -> None:
    from solvers.packing.arenas import WITH_ARENAS, arenas_of

    if len(capacities) < 2:
        return
    try:
        arenas_of(capacities)
    except ValueError as error:
        raise typer.BadParameter(f"--capacity: {error}") from None
    if solver not in WITH_ARENAS:
        raise typer.BadParameter(f"several arenas are for the solvers {', '.join(WITH_ARENAS)}")
    if output is not None and output.suffix == ".csv":
        raise typer.BadParameter("a CSV holds one arena; use another name than .csv")


def _check_fits(output: Path | None, work: Work) -> None:
    grouped = (work.buffers.group != work.buffers.group[:1]).any()
    if output is not None and output.suffix == ".csv" and (work.buffers.period is not None or grouped):
        raise typer.BadParameter(
            "a CSV holds neither iterations nor streams; use --whole, or another name than .csv"
        )


def _show(solved: Solved, output: Path | None) -> None:
    found, work, said = solved.plan, solved.work, answer(solved)
    several = said["kinds"] or ()
    if work.pattern is not None:
        what = f"{len(work.buffers):,} of one iteration, of {variants.iterations_told(work.pattern)}"
        if len(several) > 1:
            what += f", the largest of {len(several)} kinds"
    else:
        what = f"{len(work.buffers):,}" + (", the trace as one" if work.kind == "trace" else "")
    if work.minor is not None:
        what += "; " + passed_over(work.minor)
    rows = [
        ("status", f"{found.status}, by {found.solver} (stopped by {found.stopped_by or '-'})"),
        ("buffers", what),
    ]
    rows += [("peak load", binary(said["peak_load_bytes"])), ("lower bound", binary(found.lower_bound_bytes))]
    if found.offset is not None:
        rows += [
            ("arena", f"{binary(found.arena_bytes)}, {percent(found.gap)} above the lower bound"),
            ("fragmentation", percent(said["fragmentation"])),
        ]
    rows += [
        (
            f"arena {k}",
            f"{binary(one['used_bytes'])} of {binary(one['capacity_bytes'])}, {one['buffers']:,} buffers",
        )
        for k, one in enumerate(said["arenas"] or ())
    ]
    if said["stream_waits"]:
        rows.append(("waits", f"{said['stream_waits']:g} of one stream for another in an iteration"))
    rows += [("seconds", f"{found.seconds:.3f}"), ("nodes", f"{found.nodes:,}")]
    if output is not None and found.offset is not None:
        rows.append(("written", str(output)))
        if work.kind == "trace" and solved.saved is None and output.suffix != ".csv":
            rows.append(
                ("replayed", "by no pool, since it is of no iteration; pool.save() writes what one finds")
            )
    facts("plan", rows)
    if len(several) > 1:
        variants.show(several)

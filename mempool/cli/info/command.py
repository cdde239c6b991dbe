"""``mempool info``: describe the content of a trace or a plan."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it from the signature
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from mempool.cli import variants
from mempool.cli.info import memory_use
from mempool.cli.main_loop import passed_over
from mempool.cli.options import Device, Frames, Lenient  # noqa: TC001 - typer reads them from the signature
from mempool.cli.output import bar, console, facts, percent, print_json, table, tell_caveats
from mempool.units import binary, source_line

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mempool.cli.inputs import Work
    from traces import Buffers, Trace


def info(
    file: Annotated[
        Path,
        typer.Argument(
            help="A trace, a plan, a snapshot of PyTorch, a trace of its profiler, a log of RMM, lines of "
            "CuPy's DebugPrintHook, or a MiniMalloc CSV."
        ),
    ],
    *,
    largest: Annotated[
        int, typer.Option(min=0, help="How many of the largest buffers at the peak to list.")
    ] = 10,
    whole: Annotated[
        bool, typer.Option("--whole", help="Of a trace, show all of it, not the iteration that it repeats.")
    ] = False,
    device: Device = None,
    frames: Frames = False,
    lenient: Lenient = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the content of a trace or a plan: events, load over time, largest buffers at the peak, arena.

    For example:

        mempool info run.trace
        mempool info run.plan --largest 3
        mempool info snapshot.pickle --frames
        mempool info rmm_log.dev0.csv --lenient
        mempool info two_gpus.trace --device 1
        mempool info buffers.csv --json
    """
    from mempool.cli.inputs import read_work

    with bar(f"reading {file}") as told:
        work = read_work(
            file, whole=whole, main=True, lenient=lenient, device=device, several="largest", progress=told
        )
    said = answer(work, largest, frames=frames, device=device)
    if json:
        print_json(said)
    else:
        _show(file, work, said)


def answer(work: Work, largest: int, *, frames: bool = False, device: int | None = None) -> dict[str, Any]:
    """Return the keys of ``mempool info --json``; ``device`` restricts the part about where memory goes."""
    from mempool.cli.inputs import arenas
    from solvers import lower_bound, peak_load

    buffers = work.buffers
    planned = peak_load(buffers)
    if work.trace is not None and (work.trace.operation < 0).all():  # then source lines say most
        frames = True
    said: dict[str, Any] = {
        "kind": work.kind,
        "buffers": len(buffers),
        "persistent_buffers": int(buffers.persistent.sum()),
        "wrap_around_buffers": int((buffers.wrap_around & ~buffers.persistent).sum()),
        "period": buffers.period,
        "peak_load_bytes": _peak_load(work, planned),
        "iteration_peak_load_bytes": None if work.pattern is None else planned,
        "lower_bound_bytes": lower_bound(buffers),
        "largest_at_peak": _largest_at_peak(work, largest, frames=frames),
        "skipped": work.skipped,
    }
    if work.file is not None:
        said |= _events(work.file)
        said["device"] = work.device
        said["iterations"] = 1 if work.pattern is None else work.pattern.iterations
        said["kinds"] = _kinds(work)
        said["where"] = memory_use.answer(work, largest, frames=frames, device=device)
    if work.plan is not None:
        said |= {
            "status": str(work.plan.status),
            "arena_bytes": work.plan.arena_bytes,
            "arenas": arenas(work.plan, buffers),
            "fragmentation": work.plan.fragmentation(planned),
            "address_period_iterations": work.plan.columns,
            "solver": work.plan.solver,
            "seed": work.plan.seed,
            "seconds": work.plan.seconds,
            "nodes": work.plan.nodes,
            "stopped_by": work.plan.stopped_by,
        }
    return said


def _peak_load(work: Work, planned: int) -> int:
    """Return the peak load in bytes of all events, or of the buffers of a file without events."""
    if work.trace is None or work.pattern is None:
        return planned
    return int(work.trace.load().max(initial=0))


def _kinds(work: Work) -> list[dict[str, Any]] | None:
    if work.pattern is None:
        return None
    return [variants.answer(one, one.buffers) for one in (work.pattern, *work.others)]


def _events(trace: Trace) -> dict[str, Any]:
    from traces import Kind

    counts = np.bincount(trace.kind, minlength=len(Kind))
    time = trace.time_ns
    return {
        "events": len(trace),
        "allocs": int(counts[Kind.ALLOC]),
        "frees": int(counts[Kind.FREE]),
        "reads": int(counts[Kind.READ]),
        "writes": int(counts[Kind.WRITE]),
        "marks": int(counts[Kind.MARK]),
        "refused": int(counts[Kind.REFUSED]),
        "requested_bytes": int(trace.size[trace.kind == Kind.ALLOC].sum(dtype=np.float64)),
        "streams": len(np.unique(trace.stream)),
        "devices": len(trace.devices),
        "threads": len(np.unique(trace.thread)),
        "duration_ns": int(time.max()) - int(time.min()) if len(time) else 0,
        "alignment_bytes": trace.alignment,
        "metadata": dict(trace.metadata),
    }


def _largest_at_peak(work: Work, count: int, *, frames: bool) -> list[dict[str, Any]]:
    """Return the largest buffers alive at the first time of the peak load, largest first."""
    from solvers import load_curve

    buffers = work.buffers
    times, loads = load_curve(buffers)
    if len(times) == 0:
        return []
    alive = _instances(buffers, int(times[loads.argmax()]))
    rows = np.flatnonzero(alive & (buffers.size > 0))
    rows = rows[np.argsort(-buffers.size[rows], kind="stable")][:count]
    return [
        {
            "buffer": str(row) if buffers.ids is None else buffers.ids[row],
            "size_bytes": int(buffers.size[row]),
            "start": int(buffers.start[row]),
            "end": int(buffers.end[row]),
            "instances": int(alive[row]),
            **_where(work, row, frames=frames),
        }
        for row in rows.tolist()
    ]


def _instances(buffers: Buffers, time: int) -> NDArray[np.int64]:
    """Return how many instances of each planned buffer need memory at a time, int64[n]."""
    alive = _covering(buffers.start, buffers.end, time, buffers.period)
    np.subtract.at(
        alive, buffers.gap_buffer, _covering(buffers.gap_start, buffers.gap_end, time, buffers.period)
    )
    alive[buffers.persistent] = 0
    return alive


def _covering(
    start: NDArray[np.int64], end: NDArray[np.int64], time: int, period: int | None
) -> NDArray[np.int64]:
    """Return how often each half-open interval, or arc on a circle, covers a time."""
    if period is None:
        return ((start <= time) & (time < end)).astype(np.int64)
    since = (time - start) % period
    turns: NDArray[np.int64] = np.maximum(-((since - (end - start)) // period), 0)
    return turns


def _where(work: Work, row: int, *, frames: bool) -> dict[str, Any]:
    """Return the operation and, if requested, the source line of the alloc, where the recorder knew them."""
    from traces import Kind

    if work.trace is None or work.pattern is not None:
        return {}
    trace = work.trace
    event = np.flatnonzero(trace.kind == Kind.ALLOC)[row]
    said = {}
    if (operation := int(trace.operation[event])) >= 0:
        said["operation"] = trace.names[operation]
    if frames and (frame := int(trace.frame[event])) >= 0:
        said["frame"] = source_line(trace.names[frame])
    return said


def _show(file: Path, work: Work, said: dict[str, Any]) -> None:
    from mempool.cli.plot import show_addresses, show_load

    wheres = said.get("where", [])
    for device in wheres:
        of = f", device {device['device']}" if len(wheres) > 1 else ""
        tell_caveats(f"{file}{of}", device["caveats"])
    ended = any(one["device"] == work.device and one["history"] == "absent" for one in wheres)
    facts(f"{file}: {work.kind}", _facts(work, said, ended=ended))
    if work.others:
        variants.show(said["kinds"])
    print_to = console()
    if not ended:
        print_to.print("\nload over time")
        show_load(print_to, work.buffers)
    if said["largest_at_peak"]:
        rows = [
            (
                " ".join(str(entry[name]) for name in ("buffer", "operation", "frame") if name in entry),
                binary(entry["size_bytes"]),
                f"{entry['start']:,}",
                f"{entry['end']:,}",
                str(entry["instances"]),
            )
            for entry in said["largest_at_peak"]
        ]
        at = "at the end" if ended else "at the peak" if work.pattern is None else "at an iteration's peak"
        table(f"\nlargest buffers {at}", ("buffer", "size", "start", "end", "instances"), rows)
    if work.trace is not None:
        memory_use.show(said["where"])
    if work.plan is not None:
        print_to.print("\naddresses over time")
        show_addresses(print_to, work.buffers, work.plan)


def _facts(work: Work, said: dict[str, Any], *, ended: bool) -> list[tuple[str, str]]:
    rows = []
    if work.trace is not None:
        counted = ", ".join(
            f"{said[name]:,} {name}" for name in ("allocs", "frees", "reads", "writes", "marks") if said[name]
        )
        rows += [
            ("events", f"{said['events']:,}: {counted or 'none'}"),
            ("from", f"threads {said['threads']}, streams {said['streams']}, devices {said['devices']}"),
            ("requested", binary(said["requested_bytes"])),
            ("seconds", f"{said['duration_ns'] / 1e9:.3f}"),
        ]
        if said["refused"]:
            rows.insert(
                1, ("refused", "1 request" if said["refused"] == 1 else f"{said['refused']:,} requests")
            )
    if said.get("devices", 0) > 1:
        rows.append(("device", f"{said['device']}; what follows is of it alone"))
    if work.pattern is not None:
        one = "one" if not work.others else f"the largest of {1 + len(work.others)} kinds"
        told = (
            f"{said['period']:,} allocations, {variants.iterations_told(work.pattern)}; what follows is {one}"
        )
        rows.append(("iteration", told))
    elif work.minor is not None:
        rows.append(("iteration", f"{passed_over(work.minor)}; what follows is all"))
    elif said["period"] is not None:
        rows.append(("iteration", f"{said['period']:,} allocations"))
    wrap, stay = said["wrap_around_buffers"], said["persistent_buffers"]
    rows += [
        (
            "buffers",
            f"{said['buffers']:,}"
            + (f", {wrap:,} wrap around" if wrap else "")
            + (f", {stay:,} stay" if stay else ""),
        ),
        ("live at the end" if ended else "peak load", binary(said["peak_load_bytes"])),
        *(
            [("of an iteration", binary(said["iteration_peak_load_bytes"]))]
            if said["iteration_peak_load_bytes"] is not None
            else []
        ),
        ("lower bound", binary(said["lower_bound_bytes"])),
    ]
    if work.plan is not None:
        rows += [
            ("arena", f"{binary(said['arena_bytes'])}, {percent(work.plan.gap)} above the lower bound"),
            ("fragmentation", percent(said["fragmentation"])),
            ("status", f"{said['status']}, by {said['solver']}"),
        ]
    return rows

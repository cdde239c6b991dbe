"""``mempool info``: describe the content of a trace or a plan."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it from the signature
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from mempool.cli.info import flight_calls, memory_use
from mempool.cli.options import Device, Frames, Json, Lenient  # noqa: TC001 - typer reads them from the signature
from mempool.cli.output import console, facts, percent, print_caveats, print_json, table
from mempool.cli.variants import describe_iterations, describe_rejected, print_variants, variant_answer
from mempool.units import binary, source_line

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mempool.offline import InputFile
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
    json: Json = False,
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
    from mempool.cli.inputs import read_file
    from traces.formats.registry import sniff

    given = read_file(
        file, whole=whole, main_only=True, lenient=lenient, device=device, several_devices="largest"
    )
    values = answer(given, largest, frames=frames, device=device)
    is_flight = sniff(file) == "flight"
    if is_flight:
        values |= flight_calls.answer(file)
    if json:
        print_json(values)
        return
    _print(file, given, values)
    if is_flight:
        flight_calls.show(values)


def answer(
    given: InputFile, largest: int, *, frames: bool = False, device: int | None = None
) -> dict[str, Any]:
    """Return the keys of ``mempool info --json``; ``device`` restricts the analysis of memory use."""
    from solvers import lower_bound, peak_load

    buffers = given.buffers
    planned = peak_load(buffers)
    if given.trace is not None and (given.trace.operation < 0).all():  # source lines instead of operations
        frames = True
    values: dict[str, Any] = {
        "format": given.format,
        "buffers": len(buffers),
        "persistent_buffers": int(buffers.persistent.sum()),
        "wrap_around_buffers": int((buffers.wrap_around & ~buffers.persistent).sum()),
        "period": buffers.period,
        "peak_load_bytes": _peak_load(given, planned),
        "iteration_peak_load_bytes": None if given.pattern is None else planned,
        "lower_bound_bytes": lower_bound(buffers),
        "largest_at_peak": _largest_at_peak(given, largest, frames=frames),
        "skipped": given.skipped,
    }
    if given.whole_trace is not None:
        values |= _events(given.whole_trace)
        values["device"] = given.device
        values["iterations"] = 1 if given.pattern is None else given.pattern.iterations
        values["variants"] = (
            None
            if given.pattern is None
            else [variant_answer(variant, variant.buffers) for variant in given.variants]
        )
        values["per_device"] = memory_use.answer(given, largest, frames=frames, device=device)
    if given.plan is not None:
        values |= {
            "status": str(given.plan.status),
            "arena_bytes": given.plan.arena_bytes,
            "fragmentation": given.plan.fragmentation(planned),
            "address_period_iterations": given.plan.columns,
            "solver": given.plan.solver,
            "seed": given.plan.seed,
            "seconds": given.plan.seconds,
            "nodes": given.plan.nodes,
            "stopped_by": given.plan.stopped_by,
        }
    return values


def _peak_load(given: InputFile, planned: int) -> int:
    """Return the peak load in bytes of all events, or of the buffers of a file without events."""
    if given.trace is None or given.pattern is None:
        return planned
    return int(given.trace.load().max(initial=0))


def _events(trace: Trace) -> dict[str, Any]:
    from traces import EventType

    counts = np.bincount(trace.kind, minlength=len(EventType))
    time = trace.time_ns
    return {
        "events": len(trace),
        "allocs": int(counts[EventType.ALLOC]),
        "frees": int(counts[EventType.FREE]),
        "reads": int(counts[EventType.READ]),
        "writes": int(counts[EventType.WRITE]),
        "marks": int(counts[EventType.MARK]),
        "refused": int(counts[EventType.REFUSED]),
        "requested_bytes": int(trace.size[trace.kind == EventType.ALLOC].sum(dtype=np.float64)),
        "streams": len(np.unique(trace.stream)),
        "devices": len(trace.devices),
        "threads": len(np.unique(trace.thread)),
        "duration_ns": int(time.max()) - int(time.min()) if len(time) else 0,
        "alignment_bytes": trace.alignment,
        "metadata": dict(trace.metadata),
    }


def _largest_at_peak(given: InputFile, count: int, *, frames: bool) -> list[dict[str, Any]]:
    """Return the largest buffers alive at the first time of the peak load, in descending order."""
    from solvers import load_curve

    buffers = given.buffers
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
            **_source(given, row, frames=frames),
        }
        for row in rows.tolist()
    ]


def _instances(buffers: Buffers, time: int) -> NDArray[np.int64]:
    """Return the number of instances of each planned buffer that need memory at a time, int64[n]."""
    alive = _covering(buffers.start, buffers.end, time, buffers.period)
    np.subtract.at(
        alive, buffers.gap_buffer, _covering(buffers.gap_start, buffers.gap_end, time, buffers.period)
    )
    alive[buffers.persistent] = 0
    return alive


def _covering(
    start: NDArray[np.int64], end: NDArray[np.int64], time: int, period: int | None
) -> NDArray[np.int64]:
    """Return the number of times that each half-open interval, or arc on a circle, covers a time."""
    if period is None:
        return ((start <= time) & (time < end)).astype(np.int64)
    since = (time - start) % period
    turns: NDArray[np.int64] = np.maximum(-((since - (end - start)) // period), 0)
    return turns


def _source(given: InputFile, row: int, *, frames: bool) -> dict[str, Any]:
    """Return the known operation and, if requested, source line of the alloc."""
    from traces import EventType

    if given.trace is None or given.pattern is not None:
        return {}
    trace = given.trace
    event = np.flatnonzero(trace.kind == EventType.ALLOC)[row]
    values = {}
    if (operation := int(trace.operation[event])) >= 0:
        values["operation"] = trace.names[operation]
    if frames and (frame := int(trace.frame[event])) >= 0:
        values["frame"] = source_line(trace.names[frame])
    return values


def _print(file: Path, given: InputFile, values: dict[str, Any]) -> None:
    from mempool.cli.plot import show_addresses, show_load

    devices = values.get("per_device", [])
    for device in devices:
        suffix = f", device {device['device']}" if len(devices) > 1 else ""
        print_caveats(f"{file}{suffix}", device["caveats"])
    without_history = any(
        device["device"] == given.device and device["history"] == "absent" for device in devices
    )
    facts(f"{file}: {given.format}", _facts(given, values, without_history=without_history))
    if given.other_variants:
        print_variants(values["variants"])
    terminal = console()
    if not without_history:
        terminal.print("\nload over time")
        show_load(terminal, given.buffers)
    if values["largest_at_peak"]:
        moment = "at the peak" if given.pattern is None else "at an iteration's peak"
        table(
            f"\nlargest buffers {'at the end' if without_history else moment}",
            ("buffer", "size", "start", "end", "instances"),
            [
                (
                    memory_use.buffer_text(entry),
                    binary(entry["size_bytes"]),
                    f"{entry['start']:,}",
                    f"{entry['end']:,}",
                    str(entry["instances"]),
                )
                for entry in values["largest_at_peak"]
            ],
        )
    if given.trace is not None:
        memory_use.print_devices(devices)
    if given.plan is not None:
        terminal.print("\naddresses over time")
        show_addresses(terminal, given.buffers, given.plan)


def _facts(given: InputFile, values: dict[str, Any], *, without_history: bool) -> list[tuple[str, str]]:
    rows = [] if given.trace is None else _event_facts(values)
    if values.get("devices", 0) > 1:
        rows.append(("device", f"{values['device']}; the figures below are of this device"))
    if (text := _iteration_text(given, values)) is not None:
        rows.append(("iteration", text))
    wrapping, persistent = values["wrap_around_buffers"], values["persistent_buffers"]
    buffers = f"{values['buffers']:,}" + (f", {wrapping:,} wrap around" if wrapping else "")
    rows += [
        ("buffers", buffers + (f", {persistent:,} stay" if persistent else "")),
        ("live at the end" if without_history else "peak load", binary(values["peak_load_bytes"])),
    ]
    if values["iteration_peak_load_bytes"] is not None:
        rows.append(("of an iteration", binary(values["iteration_peak_load_bytes"])))
    rows.append(("lower bound", binary(values["lower_bound_bytes"])))
    if given.plan is not None:
        rows += [
            ("arena", f"{binary(values['arena_bytes'])}, {percent(given.plan.gap)} above the lower bound"),
            ("fragmentation", percent(values["fragmentation"])),
            ("status", f"{values['status']}, by {values['solver']}"),
        ]
    return rows


def _event_facts(values: dict[str, Any]) -> list[tuple[str, str]]:
    names = ("allocs", "frees", "reads", "writes", "marks")
    counts = ", ".join(f"{values[name]:,} {name}" for name in names if values[name])
    rows = [("events", f"{values['events']:,}: {counts or 'none'}")]
    if refused := values["refused"]:
        rows.append(("refused", "1 request" if refused == 1 else f"{refused:,} requests"))
    sources = ", ".join(f"{name} {values[name]}" for name in ("threads", "streams", "devices"))
    return [
        *rows,
        ("from", sources),
        ("requested", binary(values["requested_bytes"])),
        ("seconds", f"{values['duration_ns'] / 1e9:.3f}"),
    ]


def _iteration_text(given: InputFile, values: dict[str, Any]) -> str | None:
    """Describe the iteration of the report; None for a file without iterations."""
    if given.pattern is not None:
        others = len(given.other_variants)
        which = f"the largest of {1 + others} variants" if others else "one iteration"
        described = describe_iterations(given.pattern)
        return f"{values['period']:,} allocations, {described}; the figures below are of {which}"
    if given.rejected_pattern is not None:
        return f"{describe_rejected(given.rejected_pattern)}; the figures below are of the whole trace"
    return None if values["period"] is None else f"{values['period']:,} allocations"

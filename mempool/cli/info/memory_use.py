"""Output of ``mempool info`` about the use of memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mempool.cli.output import console, facts, percent, table
from mempool.units import binary, source_line

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mempool.analysis.remedies import ReservedEstimates
    from mempool.analysis.summary import DeviceSummary
    from mempool.offline import InputFile
    from traces import Trace


#: Groupings of the bytes at the peak: the key in the answer, and the key in each entry.
SHARES = (
    ("categories", "category"),
    ("phases", "phase"),
    ("modules", "module"),
    ("operations", "operation"),
    ("frames", "frame"),
)


def answer(given: InputFile, most: int, *, frames: bool, device: int | None = None) -> list[dict[str, Any]]:
    """Return one object for each device, or for one device; events are rows of the file.

    Args:
        given: a file with a trace.
        most: number of largest operations, source lines and buffers to list.
        frames: include source lines.
        device: the only device to look at; None for all.
    """
    from mempool.analysis.caveats import caveats
    from mempool.analysis.summary import summarize

    assert given.whole_trace is not None
    return [
        _device(summary, most, caveats(summary.trace, summary.device), frames=frames)
        for summary in summarize(given.whole_trace, given.begins, device)
    ]


def _device(summary: DeviceSummary, most: int, caveats: list[str], *, frames: bool) -> dict[str, Any]:
    from mempool.analysis.peak import Role, phases, shares

    peak, trace = summary.peak, summary.trace
    phase = phases(trace)
    frames = frames or bool((trace.operation[peak.alloc] < 0).all())  # then source lines say most
    values: dict[str, Any] = {
        "device": summary.device,
        "caveats": caveats,
        "history": str(summary.known.history),
        "live_before_bytes": summary.known.live_before_bytes,
        "reserved_before_bytes": summary.known.reserved_before_bytes,
        "refused": _refused(summary),
        "peak_event": summary.row(peak.event),
        "peak_load_bytes": peak.bytes,
        "roles": {role.name.lower(): int(peak.size[peak.role == role].sum()) for role in Role}
        if summary.iterations
        else None,
        "peak_phase": _name(trace, phase, peak.event),
        "peak_module": _name(trace, trace.module, peak.event),
        **{
            plural: [
                {name: share.name, "bytes": share.bytes, "buffers": share.buffers}
                for share in shares(trace, peak, column, len(trace.names) if plural == "categories" else most)
            ]
            for plural, name, column in (
                ("categories", "category", trace.category),
                ("phases", "phase", phase),
                ("modules", "module", trace.module),
                ("operations", "operation", trace.operation),
            )
            if plural == "operations" or (column >= 0).any()
        },
        "held_longest": _held_longest(summary, most, frames=frames),
        "idle_bytes": None,
        "late_bytes": None,
        "recorded": _recorded(summary),
        "simulated": _simulated(summary.estimates),
        "remedies": [
            {"name": remedy.name, "saves_bytes": remedy.saves_bytes, "how": remedy.how}
            for remedy in summary.remedies
        ],
    }
    if summary.idle is not None:
        values["idle_bytes"] = int(peak.size[summary.idle.away(summary.iteration_events)].sum())
        values["late_bytes"] = int(peak.size[summary.idle.late(peak)].sum())
    if frames:
        values["frames"] = [
            {"frame": share.name and source_line(share.name), "bytes": share.bytes, "buffers": share.buffers}
            for share in shares(trace, peak, trace.frame, most)
        ]
    return values


def _name(trace: Trace, column: NDArray[np.int32], event: int) -> str | None:
    """Return the name of an event in a column, or None if the event has none."""
    name = int(column[event]) if len(column) else -1
    return trace.names[name] if name >= 0 else None


def _held_longest(summary: DeviceSummary, most: int, *, frames: bool) -> list[dict[str, Any]]:
    from mempool.analysis.peak import Role, by_bytes_and_time

    peak, trace, rows = summary.peak, summary.trace, []
    for row in by_bytes_and_time(peak)[:most].tolist():
        alloc = int(peak.alloc[row])
        values: dict[str, Any] = {
            "buffer": int(trace.buffer[alloc]),
            "size_bytes": int(peak.size[row]),
            "start": summary.row(alloc),
            "end": summary.row(int(peak.end[row])),
        }
        if summary.iterations:
            values["role"] = Role(int(peak.role[row])).name.lower()
        if summary.idle is not None:
            values["idle_events"] = int(summary.idle.length[row])
        if (operation := int(trace.operation[alloc])) >= 0:
            values["operation"] = trace.names[operation]
        if frames and (frame := int(trace.frame[alloc])) >= 0:
            values["frame"] = source_line(trace.names[frame])
        rows.append(values)
    return rows


def _simulated(estimates: ReservedEstimates | None) -> dict[str, Any] | None:
    if estimates is None:
        return None
    pool, plan = estimates.refused or (None, None)
    return {
        "pool_bytes": estimates.pool_bytes,
        "plan_bytes": estimates.plan_bytes,
        "pool_bytes_with_refused": pool,
        "plan_bytes_with_refused": plan,
    }


def _refused(summary: DeviceSummary) -> dict[str, Any] | None:
    if summary.refusals is None:
        return None
    return asdict(summary.refusals) | {"event": summary.row(summary.refusals.event)}


def _recorded(summary: DeviceSummary) -> dict[str, Any] | None:
    recorded = summary.recorded
    if recorded is None:
        return None
    return {
        "peak_reserved_bytes": recorded.peak_reserved_bytes,
        "stranded_bytes": summary.stranded_bytes,
        "largest_free_bytes": recorded.largest_free_bytes,
        "fragmentation": recorded.fragmentation,
        "driver_calls": recorded.driver_calls,
    }


def print_devices(devices: list[dict[str, Any]]) -> None:
    """Print the result of `answer`."""
    for device in devices:
        peak, ended = max(device["peak_load_bytes"], 1), device["history"] == "absent"
        at = "at the end" if ended else "at the peak"
        facts(f"\nwhere memory goes on device {device['device']}", _facts(device))
        for key, name in SHARES:
            rows = [
                (
                    share[name] or "(unknown)",
                    binary(share["bytes"]),
                    percent(share["bytes"] / peak),
                    f"{share['buffers']:,}",
                )
                for share in device.get(key, ())
            ]
            if any(share[name] for share in device.get(key, ())):
                table(f"\n{at} by {name}", (name, "bytes", "share", "buffers"), rows)
        longest = [
            (
                buffer_text(entry),
                binary(entry["size_bytes"]),
                f"{entry['end'] - entry['start']:,}",
                *([entry["role"].replace("_", "-")] if "role" in entry else []),
            )
            for entry in device["held_longest"]
        ]
        if longest and not ended:
            table(
                "\nmost bytes held longest", ("buffer", "size", "events", "role")[: len(longest[0])], longest
            )
        if device["remedies"]:
            console().print("\nwhat would help")
        for remedy in device["remedies"]:
            console().print(f"  up to {binary(remedy['saves_bytes'])}: {remedy['how']}", markup=False)


def buffer_text(entry: dict[str, Any]) -> str:
    """Return the name of a buffer with the known operation and source line of its alloc."""
    return " ".join(str(entry[name]) for name in ("buffer", "operation", "frame") if name in entry)


def _facts(device: dict[str, Any]) -> list[tuple[str, str]]:
    from mempool.analysis.peak import LEAST_ABSENCE

    roles = {name: size for name, size in (device["roles"] or {}).items() if size}
    load = binary(device["peak_load_bytes"])
    rows = [("peak load", f"{load} after event {device['peak_event']:,}")]
    ended = device["history"] == "absent"
    if ended:
        rows = [("live at the end", load)]
    if device["peak_phase"] is not None:
        rows.append(
            ("while", " of ".join(part for part in (device["peak_phase"], device["peak_module"]) if part))
        )
    if roles:
        parts = (f"{binary(size)} {name.replace('_', '-')}" for name, size in roles.items())
        rows.append(("of it", ", ".join(parts)))
    if device["idle_bytes"] is not None:
        idle, late = binary(device["idle_bytes"]), binary(device["late_bytes"])
        rows.append(
            ("idle", f"{idle} for {LEAST_ABSENCE:.0%} of an iteration or more; {late} last used before")
        )
    if device["recorded"] is not None:
        rows += _reserved(device["recorded"], device["history"])
    if (simulated := device["simulated"]) is not None and simulated["pool_bytes"] is not None:
        part = "" if device["history"] == "whole" else " on the recorded part"
        rows.append(("with mempool run", f"{_bounded(simulated, '')}, simulated{part}"))
        if simulated["pool_bytes_with_refused"] is not None:
            rows.append(("with failed requests", _bounded(simulated, "_with_refused")))
    return rows


def _bounded(simulated: dict[str, Any], of: str) -> str:
    """Return the bytes of the pool, and of the plan as its lower bound, as text."""
    plan = simulated[f"plan_bytes{of}"]
    bound = "" if plan is None else f" (a plan of the whole recording: {binary(plan)})"
    return f"{binary(simulated[f'pool_bytes{of}'])} reserved{bound}"


def _reserved(made: dict[str, Any], history: str) -> list[tuple[str, str]]:
    ended = history == "absent"
    more = "" if history == "whole" else " or more"
    calls = "" if ended else f", in {made['driver_calls']:,}{more} calls to the driver"
    when = "at the end" if ended else "when most was reserved"
    rows = [
        ("reserved", f"{binary(made['peak_reserved_bytes'])}{calls}"),
        ("stranded", f"{binary(made['stranded_bytes'])} {when}, rounding included"),
    ]
    if made["largest_free_bytes"] is not None:
        rows.append(("largest free block", f"{binary(made['largest_free_bytes'])} then"))
    return rows

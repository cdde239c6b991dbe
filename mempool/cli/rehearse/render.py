"""Output of ``mempool rehearse``: tables for people, objects for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.cli.output import console, plain, table
from mempool.hardware.gpu_memory import KERNEL_BYTES, card, context_bytes
from mempool.units import binary, typed_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mempool.cli.rehearse.arguments import Request
    from mempool.cli.rehearse.runs import Run
    from mempool.hardware.gpu_memory import Card
    from mempool.offline import InputFile
    from mempool.rehearsal import Outcome
    from mempool.rehearsal.standin import Installation

_MOST_HOLDERS = 8  #: rows of a table of holders
#: Values of a limit's cost.
_COSTS = (
    *("limit_bytes", "planned", "step_seconds", "added_seconds", "host_bytes", "moved_bytes"),
    "smallest_limit_bytes",
)
#: Values of a child process.
_OF_PROCESS = (
    *("name", "pid", "steps", "ended", "out_of_memory_in_step", "device"),
    *("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes"),
)
_MOST_READS = 3  #: source lines of value reads in the output
_WRONG_ARGUMENTS = 2  #: exit code of argparse, and of most programs
#: Common cards, one per size of memory, the smallest first.
_USUAL = (
    *("RTX 4060", "RTX 3060", "T4", "L4", "RTX 4090", "RTX 5090"),
    *("A100 40GB", "L40S", "H100", "H200", "B200"),
)


def to_json(run: Run, request: Request) -> dict[str, Any]:
    """Return the object of one run."""
    outcome, gpu = run.outcome, request.machine.card
    judged = gpu is not None or request.limit_bytes is not None
    values: dict[str, Any] = {
        "allocator": outcome.allocator,
        "steps": outcome.steps,
        "peak_allocated_bytes": outcome.peak_allocated_bytes,
        "peak_reserved_bytes": outcome.peak_reserved_bytes,
        "allocated_bytes": outcome.allocated_bytes,
        "reserved_bytes": outcome.reserved_bytes,
        "device_bytes": outcome.device_bytes,
        "segments": outcome.segments,
        "step_peak_bytes": outcome.step_peaks,
        "out_of_memory_in_step": outcome.out_of_memory_in_step,
        "fits": run.fits if judged or not run.fits else None,
        "card": None if gpu is None else gpu.name,
        "limit_bytes": request.limit_bytes,
        "ended": outcome.ended,
        "exit_code": outcome.exit_code,
        "message": outcome.message,
        "line": outcome.line,
        "device": outcome.device,
        "devices_used": outcome.devices_used,
        "value_reads": outcome.value_reads,
        "shape_reads": outcome.shape_reads,
        "stream_faults": outcome.stream_faults,
        "redirected": outcome.redirected,
        "notes": outcome.notes,
        "seconds": outcome.seconds,
        "host_bytes": outcome.host_bytes,
        "within_limit": _cost(run),
        "processes": [{name: getattr(each, name) for name in _OF_PROCESS} for each in outcome.processes],
    }
    if request.vary is not None:
        values[request.vary[0]] = run.value
    if run.recording is not None:
        values |= _holders(run.recording, outcome.device)
    return values


def _cost(run: Run) -> dict[str, Any] | None:
    """Return the cost of the limit; None without a run for it; its numbers are None without a plan."""
    if run.within_limit is None:
        return None
    found = run.within_limit.offloading or dict.fromkeys(_COSTS)
    step, added = found["step_seconds"], found["added_seconds"]
    slow_down = 1 + added / step if step else None
    return found | {
        "slow_down": slow_down,
        "compiled": run.outcome.compiles,
        "message": run.within_limit.message,
    }


def _holders(recording: InputFile, device: int) -> dict[str, Any]:
    """Return the bytes at the peak by source line and by module."""
    from mempool.cli.info import memory_use

    found = memory_use.answer(recording, _MOST_HOLDERS, frames=True, device=device)
    if not found:
        return {}
    return {name: found[0].get(name, []) for name in ("frames", "modules")}


def show(runs: Sequence[Run], request: Request, installation: Installation) -> None:
    """Print the table of runs, the holders of the first run, and the caveats."""
    vary = () if request.vary is None else (request.vary[0],)
    limited = request.machine.card is not None or request.limit_bytes is not None
    rows = [
        (
            *(() if run.value is None else (run.value,)),
            " ".join(filter(None, (run.outcome.allocator, each.name))),
            str(each.steps),
            binary(each.peak_allocated_bytes),
            binary(each.peak_reserved_bytes),
            binary(each.device_bytes),
            _result(run, each, limited=limited),
        )
        for run in runs
        for each in _rows(run)
    ]
    gpu = request.machine.card
    device = "a device without limit" if gpu is None else f"{gpu.name}, {binary(gpu.memory_bytes)}"
    limit = "" if request.limit_bytes is None else f", PyTorch limited to {binary(request.limit_bytes)}"
    header = (*vary, "allocator", "steps", "peak allocated", "peak reserved", "on the device", "result")
    title = f"{' '.join(request.program)} on {device}{limit} (PyTorch {installation.version})"
    table(title, header, rows, fold=len(header) - 1)
    if runs[0].recording is not None:
        _show_holders(_holders(runs[0].recording, runs[0].outcome.device))
    first = runs[0].outcome
    if (used := first.devices_used) > 1:
        console().print(
            plain(f"the figures are of GPU {first.device}, the fullest of {used} that held memory")
        )
    for sentence in (*_verdict(runs, request), *_caveats(runs, request)):
        console().print(plain(sentence))


def _rows(run: Run) -> Sequence[Outcome]:
    """Return the outcomes for the table, without a successful program that only starts processes."""
    return run.processes if run.measured and not run.outcome.failed else (run.outcome, *run.outcome.processes)


def _result(run: Run, outcome: Outcome, *, limited: bool) -> str:
    if outcome.out_of_memory_in_step is not None:
        handled = ", which the program handled" if outcome.complete and not run.outcome.failed else ""
        return f"out of memory in step {outcome.out_of_memory_in_step}{handled}"
    if outcome.failed:
        return outcome.ended
    if outcome.peak_reserved_bytes == 0:
        return "used no GPU"
    if outcome.device in run.exceeded_devices:
        return "does not fit with the others"
    return "fits" if limited else "ran"


def _show_holders(holders: dict[str, Any]) -> None:
    for key, name in (("frames", "line"), ("modules", "module")):
        field = key.removesuffix("s")
        rows = [
            (
                share[field] or "(no Python frame)"
                if name == "line"
                else share[field] or "(outside a forward)",
                binary(share["bytes"]),
                f"{share['buffers']:,}",
            )
            for share in holders.get(key, ())
        ]
        if any(share[field] for share in holders.get(key, ())):
            table(f"at the peak by {name}", (name, "bytes", "buffers"), rows)


def _verdict(runs: Sequence[Run], request: Request) -> Iterator[str]:
    """Yield whether the program fits, or the smallest sufficient common card."""
    first = runs[0]
    if request.vary is not None and (request.machine.card or request.limit_bytes):
        name = request.vary[0]
        fitting = [run for run in runs if run.fits]
        yield (
            f"largest {name} that fits: {fitting[-1].value} ({fitting[-1].outcome.allocator})"
            if fitting
            else f"no {name} of these fits"
        )
    elif request.machine.card is None and request.limit_bytes is None and first.fits:
        usual = next((gpu for gpu in map(card, _USUAL) if _needs(first, gpu) <= gpu.memory_bytes), None)
        yield (
            "fits no card known here"
            if usual is None
            else f"fits a card with {binary(usual.memory_bytes)}, such as {usual.name}"
            f" (allocator {first.outcome.allocator}); --card NAME tries one"
        )
    for run in runs:
        for device, size in run.shared_bytes.items():
            few = device in run.exceeded_devices and f", and the card has {binary(run.memory_bytes or 0)}"
            yield f"processes share GPU {device}: together they hold up to {binary(size)} of it{few or ''}"
        if (cost := _cost(run)) is not None:
            name = "" if run.value is None else f"{run.value}: "
            yield name + limit_cost(cost, request.limit or 0)
        outcome = run.outcome
        if outcome.message:
            name = " ".join(filter(None, (run.value, outcome.allocator)))
            yield f"{name}: {f'at {outcome.line}: ' if outcome.line else ''}{outcome.message}"


def limit_cost(cost: dict[str, Any], limit: int | str) -> str:
    """Describe the cost of a limit with offloading, and the smallest feasible limit."""
    share = isinstance(limit, str)
    typed = limit if share else typed_size(int(limit))
    way = f'torch.compile(backend="mempool", options={{"limit": "{typed}"}})'
    name = f"offloading ({way if cost['compiled'] else f'mempool run --limit {typed}'})"
    if cost["limit_bytes"] is None:
        return f"{name}: no plan was made: {cost['message'] or 'the program made too few steps'}"
    within, smallest = binary(cost["limit_bytes"]), typed_size(cost["smallest_limit_bytes"])
    if cost["host_bytes"] is None:
        return f"{name}: no plan holds {within}; the smallest limit with a plan is {smallest}"
    if cost["slow_down"] is None:
        time = "the time of a step is unknown"
    else:
        step, added = (1e3 * cost[key] for key in ("step_seconds", "added_seconds"))
        time = f"a step takes {cost['slow_down']:.2f} times as long ({step:.3g} ms, and {added:.3g} ms more)"
    needs = (
        f"{time}, {binary(cost['host_bytes'])} of host memory, {binary(cost['moved_bytes'])} copied a step"
    )
    if not cost["planned"]:
        return f"{name}: no plan holds {within}; --limit {smallest} has one: {needs}"
    return f"{name}{f', {within}' * share}: {needs}; the smallest limit with a plan is about {smallest}"


def _needs(run: Run, gpu: Card) -> int:
    """Return the peak bytes of processes on a card, with contexts and kernels."""
    needed: dict[int, int] = {}
    for each in run.processes:
        own = each.peak_reserved_bytes + context_bytes(gpu.capability) + KERNEL_BYTES
        needed[each.device] = needed.get(each.device, 0) + own
    return max(needed.values())


def _places(places: dict[str, int]) -> str:
    """Return the most frequent source lines, and the number of the others."""
    most = sorted(places, key=lambda place: -places[place])[:_MOST_READS]
    more = f" and {len(places) - len(most)} more lines" if len(places) > len(most) else ""
    return ", ".join(most) + more


def _caveats(runs: Sequence[Run], request: Request) -> Iterator[str]:
    """Yield the caveats of the result: value reads, checkpoints, an early end."""
    outcome = runs[0].outcome
    if request.vary is not None and outcome.exit_code == _WRONG_ARGUMENTS:
        name = request.vary[0]
        yield f"if the program has no --{name}, write its own argument: {name}={{{name}}}, -b {{{name}}}, ..."
    if not runs[0].measured and outcome.complete:
        yield (
            "no memory was measured: neither the program's own process nor a Python process that it started"
            " held any"
        )
    elif outcome.ended == "program" and not any(each.steps for each in (outcome, *outcome.processes)):
        yield "the program ended without an optimizer step"
    elif outcome.ended == "steps":
        yield (
            f"ended after {outcome.steps} steps: later phases, such as an evaluation,"
            " are not in these numbers"
        )
    if request.options["check_streams"] and outcome.stream_faults:
        yield (
            "two streams use the same memory without an order: an event or record_stream is missing"
            f" ({len(outcome.stream_faults)} pairs of kernels)"
        )
        yield from (f"    {fault}" for fault in outcome.stream_faults[:_MOST_READS])
    elif request.options["check_streams"]:
        yield "no two streams use the same memory without an order, as far as arguments of kernels show"
    if outcome.shape_reads:
        yield (
            f"shapes at {_places(outcome.shape_reads)} depend on values: nothing was selected there, so what"
            " is made of it is missing (--select all selects everything)"
            if request.options["select"] == "none"
            else f"shapes at {_places(outcome.shape_reads)} depend on values: everything was selected there"
        )
    if outcome.value_reads:
        yield (
            "values read from the device are not computed; the program reads some at"
            f" {_places(outcome.value_reads)}"
        )
        if outcome.ended in ("seconds", "hang"):
            yield "a loop that ends by such a value did not end, and may have taken more than it would"
    yield from _redirected(outcome)
    yield from outcome.notes


def _redirected(outcome: Outcome) -> Iterator[str]:
    """Yield the files that were written elsewhere."""
    if outcome.redirected:
        names, more = ", ".join(outcome.redirected[:3]), len(outcome.redirected) - 3
        names += f" and {more} more" if more > 0 else ""
        yield f"written elsewhere, and gone with the rehearsal: {names} (--allow-writes writes them)"

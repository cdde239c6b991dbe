"""``mempool swap``: find the buffers that a step would offload to the host under a memory limit."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it from the signature
from typing import TYPE_CHECKING, Annotated

import typer

from mempool.cli.options import Device, Json, Lenient, parsed
from mempool.cli.output import (
    ExitCode,
    Stop,
    error_line,
    print_json,
    progress,
    require_writable,
    write_json,
)
from mempool.cli.output_files import overwritten_file

if TYPE_CHECKING:
    from solvers.swap import Link, Step
    from solvers.swap.schedule_file import StepSelection
    from traces import Trace


def swap(
    trace: Annotated[Path, typer.Argument(help="A trace with reads and writes, recognized by content.")],
    *,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE|free|PERCENT",
            help="Hold so many bytes: 12GiB; `free`: as low as it goes without a stall; 5%: as low as it "
            "goes for a step that takes 5 % longer. Given again: another row. Without any: the curve.",
        ),
    ] = None,
    link: Annotated[
        str,
        typer.Option(
            metavar="NAME|a,b",
            help="pcie3, pcie4, pcie5, nvlink-c2c, singa; measured: this machine's; or a,b: a copy takes "
            "a + b * bytes seconds; or a,b,a,b for out and in. With ,half one engine makes all copies.",
        ),
    ] = "pcie4",
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Bytes a second of the device: operations take the time to move the bytes that they access.",
        ),
    ] = None,
    least: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Smaller buffers stay on the device; 64KiB, or 1/4096 of the peak load where that is less.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="The host holds no more at a time; as much as it takes if not given."
        ),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Take all events, not the iteration between two marks.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the moves of the last limit here, as JSON.")
    ] = None,
    most: Annotated[int, typer.Option("-n", min=0, help="How many moves to list.")] = 10,
    device: Device = None,
    lenient: Lenient = False,
    json: Json = False,
) -> None:
    """Plan which buffers leave the device, and when, so that a step fits a limit.

    Every schedule is replayed by independent code before a figure of the
    schedule is reported.

    For example:

        mempool swap run.trace
        mempool swap run.trace --limit 12GiB --link pcie3
        mempool swap run.trace --limit free --limit 5% -o moves.json
        mempool swap run.trace --link 1e-5,8e-11 --bandwidth 200GB --json
    """
    from mempool.cli.swap.compute import Limit, SwapSchedules, parse_limit
    from mempool.cli.swap.render import print_schedules
    from mempool.units import parse_bytes, parse_memory

    chosen_link = parsed("--link", _parse_link, link)
    rate = parsed("--bandwidth", parse_memory, bandwidth)
    if rate == 0:
        raise typer.BadParameter("--bandwidth is more than 0 bytes a second")
    smallest = parsed("--least", parse_bytes, least)
    most_host = parsed("--host", parse_memory, host)
    limits = [parsed("--limit", parse_limit, text) or Limit() for text in limit or ()]
    assert chosen_link is not None
    if output is not None:
        if overwritten_file([trace], [output]) is not None:
            raise typer.BadParameter("the moves would overwrite the trace")
        require_writable(output)
    step, selection = _step(trace, rate, whole=whole, lenient=lenient, device=device)
    with progress("planning") as report:
        schedules = SwapSchedules(step, selection, chosen_link, least_bytes=smallest, host_limit=most_host)
        swaps = schedules.curve(report) if limit is None else schedules.for_limits(limits, report)
        report("placing what stays")
        answer = schedules.answer(swaps, most if not json and output is None else None)
    held = [row["stall_seconds"] is not None for row in answer["limits"]]
    if output is not None and held and held[-1]:
        write_json(answer | {"limits": answer["limits"][-1:]}, str(output))
    if json:
        print_json(answer)
    else:
        print_schedules(
            schedules, answer | {"moves": answer["moves"][:most]}, output if held and held[-1] else None
        )
    if not all(held):
        raise Stop(ExitCode.NEGATIVE, answer["reason"])


def _parse_link(text: str) -> Link:
    from solvers.swap import parse_link

    if text.strip().lower() != "measured":
        return parse_link(text)
    from mempool.torch.offload.engines import measure_this_machine

    with progress("measuring copies"):
        link, description = measure_this_machine()
    error_line(f"the link is measured {description}")
    return link


def _step(
    path: Path, bandwidth: int | None, *, whole: bool, lenient: bool, device: int | None
) -> tuple[Step, StepSelection]:
    from mempool.cli.inputs import read_file, require_history
    from solvers import PlanError
    from solvers.swap.schedule_file import StepSelection
    from solvers.swap.step_of_trace import iteration_of

    given = read_file(path, whole=True, lenient=lenient, device=device, several_devices="refuse")
    if given.trace is None:
        raise Stop(ExitCode.FILE, f"{path}: a {given.format}, which has no events")
    require_history(path, given)
    if not bandwidth and "rates" in given.trace.metadata:
        error_line(f"times are those of {given.trace.metadata['rates'][:200]}")
    window = None if whole else iteration_of(given.trace) or _last_iteration(given.trace)
    selection = StepSelection(window, None if not bandwidth else float(bandwidth), given.device)
    try:
        return selection.step(given.trace), selection
    except PlanError as error:
        raise Stop(ExitCode.FILE, f"{path}: {error}") from None


def _last_iteration(trace: Trace) -> tuple[int, int] | None:
    """Return begin and end of the last complete iteration that a trace without marks repeats."""
    from traces import EventType
    from traces.iterations.pattern import find_patterns

    if ((trace.kind == EventType.MARK) & (trace.category < 0)).any():
        return None
    patterns = find_patterns(trace, anywhere=True)
    begins = patterns[0].begins.tolist() if patterns else []
    return (begins[-2], begins[-1]) if len(begins) > 2 else None

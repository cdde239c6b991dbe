"""``mempool swap``: what of a step would go to the host and back, for a limit of memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - typer reads it from the signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mempool.cli.options import Device, Lenient  # noqa: TC001 - typer reads them from the signature
from mempool.cli.output import ExitCode, Stop, bar, error_line, facts, percent, print_json, progress, table
from mempool.cli.outputs import why_not, written_over
from mempool.cli.parsed import parsed
from mempool.report import binary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from solvers.swap import Link, Step, Swap, SwapPlanner
    from solvers.swap.moves import Cut
    from traces import Trace

#: What is told of a limit, None where it cannot be held.
_ROW = (
    "peak_bytes",
    "stall_seconds",
    "stall_bound_seconds",
    "iteration_seconds",
    "swapped_bytes",
    "copied_out_bytes",
    "host_bytes",
    "moves",
    "by",
)
#: Limits of the curve where none is asked for, between the least peak without a stall and the floor.
_POINTS = 6


def swap(
    trace: Annotated[Path, typer.Argument(help="A trace with reads and writes, told by content.")],
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
            help="Bytes a second of the device: operations take the time for what they touch.",
        ),
    ] = None,
    least: Annotated[str, typer.Option(metavar="SIZE", help="Smaller buffers stay on the device.")] = "64KiB",
    whole: Annotated[
        bool, typer.Option("--whole", help="Take all events, not the iteration between two marks.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the moves of the last limit here, as JSON.")
    ] = None,
    most: Annotated[int, typer.Option("-n", min=0, help="How many moves to list.")] = 10,
    device: Device = None,
    lenient: Lenient = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plan which buffers leave the device, and when, so that a step fits a limit.

    Every schedule is replayed by independent code before a number of it is
    told. The link bound beside it is what no schedule can beat.

    For example:

        mempool swap run.trace
        mempool swap run.trace --limit 12GiB --link pcie3
        mempool swap run.trace --limit free --limit 5% -o moves.json
        mempool swap run.trace --link 1e-5,8e-11 --bandwidth 200GB --json
    """
    from mempool.settings import parse_bytes

    over = parsed("--link", _parse_link, link)
    rate = parsed("--bandwidth", parse_bytes, bandwidth)
    smallest = parsed("--least", parse_bytes, least)
    asked = [parsed("--limit", _parse_limit, one) or _Limit() for one in limit or ()]
    assert over is not None
    assert smallest is not None
    if output is not None and written_over([trace], [output]) is not None:
        raise typer.BadParameter("the moves would overwrite the trace")
    if output is not None and (reason := why_not(output)):
        raise Stop(ExitCode.FILE, f"{output}: {reason}")
    step, cut = _step(trace, rate, whole=whole, lenient=lenient, device=device)
    found = _Found(step, cut, over, smallest)
    with progress("planning") as show:
        swaps = found.curve() if limit is None else found.all(asked, show)
    said = found.answer(swaps, most if not json else None)
    if output is not None and swaps:
        _write(found, swaps[-1], output)
    if json:
        print_json(said)
    else:
        _show(found, said, swaps, output)
    if any(one["stall_seconds"] is None for one in said["limits"]):
        raise Stop(ExitCode.NEGATIVE, said["reason"])


@dataclass(frozen=True)
class _Limit:
    """So many bytes, or a step that takes so much longer, as a fraction of its time."""

    size: int | None = None
    slower: float = 0.0


def _parse_link(text: str) -> Link:
    from solvers.swap import parse_link

    if text.strip().lower() != "measured":
        return parse_link(text)
    from mempool.torch.swapping.link import of_this_machine

    with progress("measuring copies"):
        link, of = of_this_machine()
    error_line(f"the link is measured {of}")
    return link


def _rates(link: Link) -> str:
    """What a link is, for people."""
    ways = (("out", link.out_fixed, link.out_per_byte), ("back", link.in_fixed, link.in_per_byte))
    text = ", ".join(
        f"{name} {1e6 * fixed:.3g} us + {1e-9 / max(per_byte, 1e-15):.3g} GB/s"
        for name, fixed, per_byte in ways
    )
    return f"{text}, {'both at once' if link.duplex else 'one after the other'}"


def _parse_limit(text: str) -> _Limit:
    from mempool.settings import parse_bytes

    if text.strip().lower() == "free":
        return _Limit()
    if percentage := re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*%\s*", text):
        return _Limit(slower=float(percentage[1]) / 100)
    return _Limit(parse_bytes(text) or 0)


def _step(
    path: Path, bandwidth: int | None, *, whole: bool, lenient: bool, device: int | None
) -> tuple[Step, Cut]:
    from mempool.cli.work import read_work
    from solvers import PlanError
    from solvers.swap.moves import Cut
    from solvers.swap.of_trace import iteration_of

    with bar(f"reading {path}") as told:
        work = read_work(path, whole=True, lenient=lenient, device=device, several="refuse", progress=told)
    if work.kind != "trace" or work.trace is None:
        raise Stop(ExitCode.FILE, f"{path}: a {work.kind}, which has no events")
    window = None if whole else iteration_of(work.trace) or _repeats(work.trace)
    cut = Cut(window, None if not bandwidth else float(bandwidth), work.device)
    try:
        return cut.step(work.trace), cut
    except PlanError as error:
        raise Stop(ExitCode.FILE, f"{path}: {error}") from None


def _repeats(trace: Trace) -> tuple[int, int] | None:
    """The last but one of the iterations that a trace without marks repeats."""
    from traces import Kind
    from traces.pattern import find_patterns

    if (trace.kind == Kind.MARK).any():
        return None
    found = find_patterns(trace, anywhere=True)
    begins = found[0].begins.tolist() if found else []
    return (begins[-2], begins[-1]) if len(begins) > 2 else None


class _Found:
    """What was asked of one step, and what was found."""

    def __init__(self, step: Step, cut: Cut, link: Link, least_bytes: int) -> None:
        from solvers.swap import LinkBound, SwapPlanner

        self.step, self.cut, self.link = step, cut, link
        self.planner: SwapPlanner = SwapPlanner(step, link, least_bytes=least_bytes)
        self._bound = LinkBound(step, link)
        self.reason = ""

    def curve(self) -> list[Swap | int]:
        """Limits from the least peak without a stall down to the floor."""
        free = self.planner.without_stall()
        floor = self.planner.floor()[0]
        gap = free.peak_bytes - floor
        limits = [self.step.peak_bytes, *(free.peak_bytes - gap * k // _POINTS for k in range(_POINTS + 1))]
        return list(self.planner.curve(sorted({one for one in limits if one >= floor}, reverse=True)))

    def all(self, asked: Sequence[_Limit], show: Callable[[str], None]) -> list[Swap | int]:
        """The schedule of each limit, or the limit where it cannot be held."""
        sizes = [one.size for one in asked if one.size is not None and self._can(one.size)]
        show(f"planning for {len(sizes)} limits")
        held = dict(zip(sizes, self.planner.curve(sizes), strict=True))
        result: list[Swap | int] = []
        for one in asked:
            if one.size is not None:
                result.append(held.get(one.size, one.size))
            else:
                show(f"planning for a step {percent(one.slower)} slower")
                result.append(self.planner.within(one.slower) if one.slower else self.planner.without_stall())
        return result

    def _can(self, limit: int) -> bool:
        from solvers import PlanError

        try:
            self.planner.check(limit)
        except PlanError as error:
            self.reason = str(error)
            return False
        return True

    def answer(self, swaps: list[Swap | int], most: int | None) -> dict[str, Any]:
        """The keys of ``mempool swap --json``."""
        from solvers.swap.moves import moves_of, said_of

        floor, op = self.planner.floor()
        step = self.step
        return {
            "peak_load_bytes": step.peak_bytes,
            "iteration_seconds": step.duration,
            "operations": len(step),
            "buffers": len(step.size),
            "repeats": step.circular,
            "floor_bytes": floor,
            "floor_operation": step.name(op),
            "free_bound_bytes": self._bound.peak_bytes(),
            "limits": [self._row(one) for one in swaps],
            "moves": []
            if not swaps or isinstance(swaps[-1], int)
            else moves_of(step, swaps[-1].schedule, most),
            "reason": self.reason or None,
            **said_of(self.cut, self.link),
        }

    def _row(self, swap: Swap | int) -> dict[str, Any]:
        if isinstance(swap, int):
            return {"limit_bytes": swap, **dict.fromkeys(_ROW)}
        did = swap.replayed
        values = (
            did.peak_bytes,
            did.stall_seconds,
            self._bound.stall_seconds(swap.limit_bytes) if did.stall_seconds else 0.0,
            did.iteration_seconds,
            did.returned_bytes,
            did.moved_bytes,
            did.host_bytes,
            len(swap.schedule),
            swap.how,
        )
        return {"limit_bytes": swap.limit_bytes, **dict(zip(_ROW, values, strict=True))}


def _write(found: _Found, swap: Swap | int, output: Path) -> None:
    from mempool.cli.output import write_json

    if not isinstance(swap, int):
        write_json(found.answer([swap], None), str(output))


def _show(found: _Found, said: dict[str, Any], swaps: list[Swap | int], output: Path | None) -> None:
    step = found.step
    turn = "an iteration, over and over" if step.circular else "one step"
    facts(
        "swap",
        [
            ("step", f"{len(step):,} operations in {step.duration * 1e3:,.2f} ms, {turn}"),
            ("peak load", binary(said["peak_load_bytes"])),
            ("floor", f"{binary(said['floor_bytes'])}, at operation {said['floor_operation']}"),
            ("link", _rates(found.link)),
            ("link bound", f"no schedule without a stall is below {binary(said['free_bound_bytes'])}"),
        ],
    )
    header = ("limit", "peak", "less", "stall", "at least", "slower", "swapped", "host", "by")
    table("\nheld, as replayed", header, [_text(found, row) for row in said["limits"]])
    if said["moves"]:
        rows = [
            (
                f"{one['buffer']}",
                binary(one["size_bytes"]),
                one["last_name"],
                f"{one['release_operation']}",
                f"{one['fetch_operation']}",
                one["use_name"],
            )
            for one in said["moves"]
        ]
        head = ("buffer", "size", "leaves after", "gone by", "fetched at", "used by")
        table(f"\nlargest moves at {binary(said['limits'][-1]['limit_bytes'])}", head, rows)
    if output is not None and swaps and not isinstance(swaps[-1], int):
        facts("", [("written", str(output))])


def _text(found: _Found, row: dict[str, Any]) -> tuple[str, ...]:
    limit = binary(row["limit_bytes"])
    if row["stall_seconds"] is None:
        return limit, "-", "-", "-", "-", "-", "-", "-", "cannot be held"
    step = found.step
    return (
        limit,
        binary(row["peak_bytes"]),
        percent(1 - row["peak_bytes"] / max(step.peak_bytes, 1)),
        f"{row['stall_seconds'] * 1e3:.2f} ms",
        f"{row['stall_bound_seconds'] * 1e3:.2f} ms",
        percent(row["stall_seconds"] / step.duration),
        binary(row["swapped_bytes"]),
        binary(row["host_bytes"]),
        row["by"],
    )

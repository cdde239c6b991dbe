"""Output of ``mempool swap``: the step, a row for each limit, the largest moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.cli.output import facts, percent, table
from mempool.units import binary

if TYPE_CHECKING:
    from pathlib import Path

    from mempool.cli.swap.compute import SwapSchedules
    from solvers.swap import Link


def print_schedules(schedules: SwapSchedules, answer: dict[str, Any], written: Path | None) -> None:
    """Print the result; ``written`` is the file of the moves."""
    step, lowest = schedules.step, schedules.planner.lowest_limit()
    turn = "an iteration, over and over" if step.circular else "one step"
    facts(
        "swap",
        [
            ("step", f"{len(step):,} operations in {step.duration * 1e3:,.2f} ms, {turn}"),
            ("peak load", binary(answer["peak_load_bytes"])),
            ("floor", f"{binary(answer['floor_bytes'])}, at operation {answer['floor_operation']}"),
            ("link", _rates(schedules.link)),
            *(
                []
                if lowest == answer["floor_bytes"]
                else [("host", f"with so few bytes on the host, not below {binary(lowest)}")]
            ),
        ],
    )
    header = ("limit", "peak", "less", "stall", "slower", "swapped", "host", "by")
    table("\nheld, as replayed", header, [_text(schedules, row) for row in answer["limits"]])
    if answer["moves"]:
        rows = [
            (
                f"{move['buffer']}",
                binary(move["size_bytes"]),
                move["last_name"],
                f"{move['release_operation']}",
                f"{move['fetch_operation']}",
                move["use_name"],
            )
            for move in answer["moves"]
        ]
        head = ("buffer", "size", "leaves after", "gone by", "fetched at", "used by")
        table(f"\nlargest moves at {binary(answer['limits'][-1]['limit_bytes'])}", head, rows)
    if all(row["limit_bytes"] >= answer["peak_load_bytes"] for row in answer["limits"]):
        facts("", [("nothing to do", "the peak load is within the limit; nothing has to move")])
    if rests := sum(move["size_bytes"] for move in answer["resting"]):
        facts("", [("away always", f"{binary(rests)} that no operation touches")])
    if answer["arena_bytes"] is not None:
        device, host = binary(answer["arena_bytes"]), binary(answer["host_arena_bytes"])
        last = binary(answer["limits"][-1]["limit_bytes"])
        facts("", [("arenas", f"{device} on the device, {host} on the host, at {last}")])
    if written is not None:
        facts("", [("written", str(written))])


def _text(schedules: SwapSchedules, row: dict[str, Any]) -> tuple[str, ...]:
    limit = binary(row["limit_bytes"])
    if row["stall_seconds"] is None:
        return limit, "-", "-", "-", "-", "-", "-", "cannot be held"
    step = schedules.step
    return (
        limit,
        binary(row["peak_bytes"]),
        percent(1 - row["peak_bytes"] / max(step.peak_bytes, 1)),
        f"{row['stall_seconds'] * 1e3:.2f} ms",
        percent(row["stall_seconds"] / step.duration),
        binary(row["swapped_bytes"]),
        binary(row["host_bytes"]),
        row["by"],
    )


def _rates(link: Link) -> str:
    """Describe a link for people."""
    ways = (("out", link.out_fixed, link.out_per_byte), ("back", link.in_fixed, link.in_per_byte))
    text = ", ".join(
        f"{name} {1e6 * fixed:.3g} us + {1e-9 / max(per_byte, 1e-15):.3g} GB/s"
        for name, fixed, per_byte in ways
    )
    return f"{text}, {'both at once' if link.duplex else 'one after the other'}"

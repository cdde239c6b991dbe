"""Output of ``mempool swap``: the step, a row for each limit, the largest moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.cli.output import facts, percent, table
from mempool.units import binary

if TYPE_CHECKING:
    from pathlib import Path

    from mempool.cli.swap.compute import Found
    from solvers.swap import Link


def show(found: Found, said: dict[str, Any], written: Path | None) -> None:
    """Print the result; ``written`` is the file of the moves."""
    step, lowest = found.step, found.planner.lowest_limit()
    turn = "an iteration, over and over" if step.circular else "one step"
    facts(
        "swap",
        [
            ("step", f"{len(step):,} operations in {step.duration * 1e3:,.2f} ms, {turn}"),
            ("peak load", binary(said["peak_load_bytes"])),
            ("floor", f"{binary(said['floor_bytes'])}, at operation {said['floor_operation']}"),
            ("link", _rates(found.link)),
            *(
                []
                if lowest == said["floor_bytes"]
                else [("host", f"with so few bytes on the host, not below {binary(lowest)}")]
            ),
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
    if all(row["limit_bytes"] >= said["peak_load_bytes"] for row in said["limits"]):
        facts("", [("nothing to do", "the peak load is within the limit; nothing has to move")])
    if rests := sum(one["size_bytes"] for one in said["resting"]):
        facts("", [("away always", f"{binary(rests)} that no operation touches")])
    if said["arena_bytes"] is not None:
        device, host = binary(said["arena_bytes"]), binary(said["host_arena_bytes"])
        last = binary(said["limits"][-1]["limit_bytes"])
        facts("", [("arenas", f"{device} on the device, {host} on the host, at {last}")])
    if written is not None:
        facts("", [("written", f"{written}; draw it: mempool show TRACE --swap {written}")])


def _text(found: Found, row: dict[str, Any]) -> tuple[str, ...]:
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


def _rates(link: Link) -> str:
    """Return a readable description of a link."""
    ways = (("out", link.out_fixed, link.out_per_byte), ("back", link.in_fixed, link.in_per_byte))
    text = ", ".join(
        f"{name} {1e6 * fixed:.3g} us + {1e-9 / max(per_byte, 1e-15):.3g} GB/s"
        for name, fixed, per_byte in ways
    )
    return f"{text}, {'both at once' if link.duplex else 'one after the other'}"

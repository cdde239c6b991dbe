"""Calls and failures in a flight recorder's file, for ``mempool info``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from mempool.cli.output import table

if TYPE_CHECKING:
    from pathlib import Path

#: Number of latest failed calls to show.
_MOST = 10


def answer(path: Path) -> dict[str, Any]:
    """Return the keys of a flight in ``mempool info --json``."""
    from traces.formats.flight import read_records

    flight = read_records(path)
    calls = Counter(flight.names[number] for number in flight.records["call"].tolist())
    failures = flight.failures
    return {
        "calls": dict(calls.most_common()),
        "lost_records": flight.lost,
        "failures": len(failures),
        "last_failures": [
            {
                "number": int(record["number"]),
                "call": flight.names[record["call"]],
                "result": int(record["result"]),
                "arguments": record["arguments"].tolist(),
                "seconds": (int(record["end_ns"]) - flight.began_ns) / 1e9,
            }
            for record in failures[-_MOST:]
        ],
    }


def show(values: dict[str, Any]) -> None:
    """Print the calls by number, and the latest failed calls."""
    table("\ncalls", ("call", "number"), [(name, f"{count:,}") for name, count in values["calls"].items()])
    table(
        f"\nlast of {values['failures']:,} failed calls",
        ("number", "seconds", "call", "result", "arguments"),
        [
            (
                f"{one['number']:,}",
                f"{one['seconds']:.3f}",
                one["call"],
                str(one["result"]),
                " ".join(f"{value:#x}" if value > 1 << 40 else f"{value:,}" for value in one["arguments"]),
            )
            for one in values["last_failures"]
        ],
    )

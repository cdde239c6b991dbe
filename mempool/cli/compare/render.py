"""Output of ``mempool compare``: JSON objects, tables, and a summary of many files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.cli.output import console, percent, plain, print_caveats, table
from mempool.units import binary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mempool.analysis.compare import FailedComparison, Row
    from mempool.analysis.compare_many import FileComparison


def answers(result: FileComparison) -> list[dict[str, Any]]:
    """Return the objects of ``--json``; an unreadable file gives one object with only ``error`` set."""
    from mempool.analysis.compare import Row

    about = {"file": result.file, "skipped": result.skipped}
    if result.error is not None:
        return [about | dict.fromkeys(Row.__dataclass_fields__) | {"error": result.error, "caveats": []}]
    return [about | row.to_dict() | {"caveats": result.caveats.get(row.device, [])} for row in result.rows]


def errors(result: FileComparison) -> Iterator[str]:
    """Yield one line for each failed comparison."""
    if result.error is not None:
        yield result.error
    for row in result.rows:
        if (text := row.to_dict()["error"]) is not None:
            yield f"{result.file}: {_name(row)}: {text}"


def print_results(results: list[FileComparison], limit_bytes: int | None) -> None:
    """Print a table for each file and device, and a summary of several files."""
    for result in results:
        rows = _known(result)
        for device in dict.fromkeys(row.device for row in rows):
            print_caveats(f"{result.file}, device {device}", result.caveats.get(device, []))
            _table(result.file, device, [row for row in rows if row.device == device], limit_bytes)
        if not result.rows and result.error is None:
            console().print(plain(f"{result.file}: no allocations"))
    if sum(bool(_known(result)) for result in results) > 1:
        _summary(results, limit_bytes)


def _known(result: FileComparison) -> list[Row]:
    from mempool.analysis.compare import Row

    return [row for row in result.rows if isinstance(row, Row)]


def _table(file: str, device: int, rows: list[Row], limit_bytes: int | None) -> None:
    limited = limit_bytes is not None or any(row.fits is not None for row in rows)
    header = ["allocator", "reserved", "lost", "rounding", "largest gap", "calls", *["fits"] * limited, "s"]
    lines = [
        [
            _name(row),
            binary(row.peak_reserved_bytes),
            percent(row.fragmentation),
            "unknown" if row.internal_fragmentation is None else percent(row.internal_fragmentation),
            binary(row.largest_free_bytes) if row.largest_free_bytes is not None else "unknown",
            f"{row.driver_calls:,}",
            *[_fits(row)] * limited,
            f"{row.seconds:.2f}",
        ]
        for row in rows
    ]
    table(f"{file}, device {device}: {_loads(rows)}", header, lines)
    for row in rows:
        if row.failed_at is not None:
            console().print(plain(_failure(row, limit_bytes)))


def _loads(rows: list[Row]) -> str:
    """Return the peak load without and, if the rows have them, with failed requests."""
    name = "live at the end" if rows and rows[0].history == "absent" else "peak load"
    loads = {row.refused > 0: row.peak_load_bytes for row in rows}
    parts = [binary(loads[False])] if False in loads else []
    if True in loads and loads[True] != loads.get(False):
        parts.append(f"{binary(loads[True])} with the requests that failed")
    return f"{name} {', '.join(parts)}"


def _fits(row: Row) -> str:
    """Return whether a row fits; undecided if unrecorded history may need more."""
    if row.fits and row.refused:
        return "so far"
    if row.fits is not None or row.history == "whole":
        return "no" if row.fits is False else "yes"
    return "in window" if row.history == "window" else "unknown"


def _name(row: Row | FailedComparison) -> str:
    """Return the allocator with its settings, in the syntax of ``-a``."""
    if row.settings.keys() == {"conf"}:
        return f"{row.allocator}:{row.settings['conf']}"
    settings = ",".join(f"{key}={value}" for key, value in row.settings.items())
    return f"{row.allocator}:{settings}" if settings else row.allocator


def _failure(row: Row, limit_bytes: int | None) -> str:
    failed = row.failed_at
    assert failed is not None
    place = ", ".join(part for part in (failed.operation, failed.frame) if part)
    where = f" in {place}" if place else ""
    limit = "what its settings allow" if limit_bytes is None else binary(limit_bytes)
    if failed.before:
        return f"{_name(row)} held more than {limit} before the first event that is recorded"
    verb = "ran out of memory" if failed.recorded else f"runs out of {limit}"
    return f"{_name(row)} {verb} at event {failed.event:,}{where}, which asks for {binary(failed.size_bytes)}"


def _summary(results: list[FileComparison], limit_bytes: int | None) -> None:
    """Print each allocator's smallest and largest reserved bytes, the largest file, and the failures."""
    rows: dict[str, list[tuple[str, Row]]] = {}
    for result in results:
        for row in _known(result):
            rows.setdefault(_name(row), []).append((result.file, row))
    limited = limit_bytes is not None or any(
        row.fits is False for result in results for row in _known(result)
    )
    lines = []
    for name, members in rows.items():
        file, worst = max(members, key=lambda member: member[1].peak_reserved_bytes)
        least = min(row.peak_reserved_bytes for _, row in members)
        out = sum(row.fits is False for _, row in members)
        lines.append(
            [
                name,
                binary(least),
                binary(worst.peak_reserved_bytes),
                *[f"{out} of {len(members)}"] * limited,
                f"{file}, device {worst.device}",
            ]
        )
    header = ["allocator", "least reserved", "most reserved", *["out of memory"] * limited, "where most"]
    table("all files", header, lines, fold=len(header) - 1)

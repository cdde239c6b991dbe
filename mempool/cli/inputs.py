"""Reading of input files for the verbs: a progress bar, and one line on stderr for each missing part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from mempool.cli.output import bar, error_line

if TYPE_CHECKING:
    from collections import Counter
    from pathlib import Path

    from mempool.offline import InputFile


def read_file(path: Path, **options: Any) -> InputFile:
    """Read an input file; ``options`` are those of `mempool.offline.read_input`.

    Raises:
        TraceError, PlanError, OSError: as `mempool.offline.read_input`.
        typer.BadParameter: the device does not exist, or a device must be named.
    """
    from mempool.errors import UsageError
    from mempool.offline import read_input

    try:
        with bar(f"reading {path}") as progress:
            given = read_input(path, progress=progress, **options)
    except UsageError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from None
    if given.format == "trace":
        print_skipped(path, given.skipped)
    return given


def print_skipped(path: Path | str, skipped: Counter[str] | None) -> None:
    """Write a line to stderr about omitted events, and a line about corrected events."""
    if not skipped:
        return
    from traces.formats.chrome import CORRECTED

    counts = skipped.most_common()
    for verb, corrected in (("left out", False), ("corrected", True)):
        found = [(reason, count) for reason, count in counts if (reason in CORRECTED) is corrected]
        if total := sum(count for _, count in found):
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in found)
            error_line(f"{path}: {total:,} {'event' if total == 1 else 'events'} {verb}: {reasons}")


def require_history(path: Path, given: InputFile) -> None:
    """Write one line to stderr for each missing part of a trace's history.

    Raises:
        TraceError: the trace has no events, only the state at the end.
    """
    from mempool.offline import planning_caveats

    for sentence in planning_caveats(path, given):
        error_line(f"{path}: {sentence}")

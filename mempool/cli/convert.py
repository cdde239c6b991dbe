"""``mempool convert``: write a trace, or the buffers of a trace, in another format."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from pathlib import Path  # noqa: TC003 - typer reads it from the signature
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from mempool.cli.options import Frames, Json, Lenient  # noqa: TC001 - typer reads them from the signature
from mempool.cli.output import facts, print_json, progress
from mempool.cli.output_files import overwritten_file

if TYPE_CHECKING:
    from traces import Trace

#: Suffixes of formats that this verb cannot write, refused since the file would contain Parquet.
_UNWRITABLE_SUFFIXES = (".gz", ".html", ".json", ".log", ".perfetto", ".pftrace", ".pickle", ".pkl", ".plan")


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="A trace, a snapshot of PyTorch, a trace of its profiler, a log of RMM, lines of CuPy's "
            "DebugPrintHook, or a MiniMalloc CSV."
        ),
    ],
    target: Annotated[
        Path, typer.Argument(help="What to write: a MiniMalloc CSV under a name in .csv, else a trace.")
    ],
    *,
    frames: Frames = False,
    lenient: Lenient = False,
    json: Json = False,
) -> None:
    """Write a trace as Parquet, or the buffers of a trace as a MiniMalloc CSV.

    Logs of RMM and of CuPy become Parquet piece by piece, so they may be
    larger than memory. Source lines stay out of the trace without --frames.

    For example:

        mempool convert snapshot.pickle snapshot.trace --frames
        mempool convert rmm_log.dev0.csv rmm.trace --lenient
        mempool convert profile.json.gz profile.trace
        mempool convert run.trace buffers.csv
        mempool convert buffers.csv buffers.trace
    """
    _check_target(source, target)
    skipped = Counter[str]() if lenient else None
    with progress(f"converting {source}"):
        if target.suffix == ".csv":
            answer = _as_csv(source, target, skipped)
        else:
            answer = _as_trace(source, target, skipped, frames=frames)
    answer |= {"target": str(target), "skipped": skipped}
    if json:
        print_json(answer)
        return
    rows = [(name, f"{answer[name]:,}") for name in ("events", "buffers")]
    facts(f"{target}: {answer['format']}", [*rows, *sorted(answer["metadata"].items())])


def _check_target(source: Path, target: Path) -> None:
    if overwritten_file([source], [target]) is not None:
        raise typer.BadParameter("the input would be overwritten")
    if target.suffix.lower() in _UNWRITABLE_SUFFIXES:
        raise typer.BadParameter(f"no {target.suffix} is written, but .csv, and .trace or .parquet")


def _as_trace(source: Path, target: Path, skipped: Counter[str] | None, *, frames: bool) -> dict[str, Any]:
    from mempool.cli.inputs import print_skipped
    from traces import EventType
    from traces.formats.parquet import TraceWriter
    from traces.read import read_pieces

    pieces = read_pieces(source, skipped=skipped)
    first = next(pieces)
    print_skipped(source, skipped)
    metadata = dict(first.metadata)
    events = buffers = 0
    with TraceWriter(target, metadata=metadata) as writer:
        for piece in itertools.chain([first], pieces):
            writer.write(piece if frames else _without_frames(piece))
            events += len(piece)
            buffers += int((piece.kind == EventType.ALLOC).sum())
    return {"format": "trace", "events": events, "buffers": buffers, "metadata": metadata}


def _as_csv(source: Path, target: Path, skipped: Counter[str] | None) -> dict[str, Any]:
    from mempool.cli.inputs import print_skipped
    from traces import buffers_of
    from traces.formats.minimalloc import write_csv
    from traces.read import read

    trace = read(source, skipped=skipped)
    print_skipped(source, skipped)
    buffers = buffers_of(trace)
    write_csv(buffers, target)
    return {
        "format": "csv",
        "events": len(trace),
        "buffers": len(buffers),
        "metadata": dict(trace.metadata),
    }


def _without_frames(piece: Trace) -> Trace:
    """Drop source lines and stacks; unused names are not written."""
    unknown = np.full(len(piece), -1, np.int32)
    return dataclasses.replace(piece, frame=unknown, stack=unknown)

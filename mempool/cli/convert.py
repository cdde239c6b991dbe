"""``mempool convert``: a trace, or its buffers, in another format."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it from the signature
from typing import Annotated

import typer

from mempool.cli.output import ExitCode, Stop, facts, print_json, progress


def convert(
    source: Annotated[Path, typer.Argument(help="A trace, a snapshot of PyTorch, a log of RMM.")],
    target: Annotated[Path, typer.Argument(help="What to write; a name in .csv makes a MiniMalloc CSV.")],
    *,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a trace as Parquet, or its buffers as a MiniMalloc CSV.

    For example:

        mempool convert snapshot.pickle snapshot.trace
        mempool convert rmm_log.dev0.csv rmm.trace
        mempool convert run.trace buffers.csv
    """
    from mempool.cli.work import read_work
    from traces.minimalloc import write_csv
    from traces.parquet import write_trace

    with progress(f"reading {source}"):
        work = read_work(source, whole=True)
    if work.trace is None:
        raise Stop(ExitCode.FILE, f"{source}: a {work.kind}, which has no events to convert")
    kind = "csv" if target.suffix == ".csv" else "trace"
    with progress(f"writing {target}"):
        if kind == "csv":
            write_csv(work.buffers, target)
        else:
            write_trace(work.trace, target)
    said = {
        "target": str(target),
        "format": kind,
        "events": len(work.trace),
        "buffers": len(work.buffers),
        "metadata": dict(work.trace.metadata),
    }
    if json:
        print_json(said)
    else:
        facts(
            f"{target}: {kind}",
            [
                ("events", f"{said['events']:,}"),
                ("buffers", f"{said['buffers']:,}"),
                *sorted(work.trace.metadata.items()),
            ],
        )

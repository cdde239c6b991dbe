"""``mempool compare``: allocators side by side on what traces recorded."""

from __future__ import annotations

import contextlib
import glob
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mempool.cli.options import Lenient  # noqa: TC001 - typer reads it from the signature
from mempool.cli.output import ExitCode, Stop, console, error_line, percent, print_json, progress, table
from mempool.cli.parsed import parsed
from mempool.report import binary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor

    from mempool.analysis.compare import Choice, Row
    from mempool.analysis.many import Compared


def _allocators(incomplete: str) -> list[str]:
    from mempool.what_if import ALLOCATORS

    return [name for name in ("recorded", *ALLOCATORS) if name.startswith(incomplete)]


def compare(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE...", help="Traces of any format, such as one per rank; quoted patterns work too."
        ),
    ],
    *,
    allocator: Annotated[
        list[str] | None,
        typer.Option(
            "-a",
            "--allocator",
            metavar="NAME[:SETTINGS]",
            autocompletion=_allocators,
            help="Compare these only; again for each. Settings are KEY=VALUE, with commas between them.",
        ),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Tell who runs out of so much memory, when and on what: 24GiB."),
    ] = None,
    dask: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Work on a Dask cluster, which must see the files: tcp://host:8786."
        ),
    ] = None,
    lenient: Lenient = False,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list of objects, one a row.")] = False,
) -> None:
    """Put what traces recorded through other allocators, and compare what each would have reserved.

    For example:

        mempool compare snapshot.pickle
        mempool compare run.trace --limit 24GiB
        mempool compare run.trace -a recorded -a pytorch:max_split_size_mb=128 -a planned
        mempool compare 'runs/*/rank*.pickle' --json
        mempool compare 'runs/*/rank*.pickle' --dask tcp://scheduler:8786
    """
    from mempool.analysis.choices import parse_choice
    from mempool.cli.work import tell_skipped
    from mempool.settings import parse_bytes

    named = [parsed("--allocator", parse_choice, text) for text in allocator or ()]
    choices = [choice for choice in named if choice is not None] or None
    limit_bytes = parsed("--limit", parse_bytes, limit)
    paths = _paths(files)
    found = []
    with _executor(dask) as executor:
        for one in _compared(paths, choices, limit_bytes, executor, lenient=lenient):
            found.append(one)
            tell_skipped(one.file, one.skipped)
            if one.error is not None:
                error_line(one.error)
    found.sort(key=lambda one: paths.index(one.file))
    if json:
        print_json(
            [{"file": one.file, "skipped": one.skipped, **row.to_dict()} for one in found for row in one.rows]
        )
    else:
        _show(found, limit_bytes)
    if any(one.error is not None for one in found):
        raise Stop(ExitCode.FILE)


def _paths(given: Sequence[str]) -> list[str]:
    """The files, each once; what is no file and looks like a pattern stands for all that it matches."""
    paths: dict[str, None] = {}
    for text in given:
        if glob.has_magic(text) and not Path(text).exists():
            matches = sorted(glob.glob(text, recursive=True))  # noqa: PTH207 - absolute patterns too
            if not matches:
                raise Stop(ExitCode.FILE, f"{text}: no file matches")
            paths |= dict.fromkeys(matches)
        else:
            paths[text] = None
    return list(paths)


@contextlib.contextmanager
def _executor(dask: str | None) -> Iterator[Executor | None]:
    if dask is None:
        yield None
        return
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError:
        raise Stop(ExitCode.FAILED, "--dask needs Dask: pip install 'mempool[dask]'") from None
    try:
        client = distributed.Client(dask, timeout="10s")
    except (OSError, ValueError) as error:
        raise Stop(ExitCode.FAILED, f"no Dask scheduler at {dask}: {error}") from None
    with client, client.get_executor(pure=False, retries=2) as executor:
        yield executor


def _compared(
    paths: list[str],
    choices: Sequence[Choice] | None,
    limit_bytes: int | None,
    executor: Executor | None,
    *,
    lenient: bool,
) -> Iterator[Compared]:
    from mempool.analysis.many import compare_files

    what = f"comparing {paths[0] if len(paths) == 1 else f'{len(paths)} files'}"
    with progress(what) as say:
        results = compare_files(
            paths,
            choices,
            limit_bytes=limit_bytes,
            lenient=lenient,
            executor=executor,
            told=lambda now: say(f"{what}: {now}"),
        )
        for done, one in enumerate(results, 1):
            say(f"compared {done} of {len(paths)} files")
            yield one


def _show(found: list[Compared], limit_bytes: int | None) -> None:
    for one in found:
        for device in dict.fromkeys(row.device for row in one.rows):
            _table(one.file, device, [row for row in one.rows if row.device == device], limit_bytes)
    if sum(bool(one.rows) for one in found) > 1:
        _summary(found, limit_bytes)


def _table(file: str, device: int, rows: list[Row], limit_bytes: int | None) -> None:
    fits = [] if limit_bytes is None else ["fits"]
    header = ["allocator", "reserved", "lost", "rounding", "largest gap", "calls", *fits, "s"]
    lines = [
        [
            _name(row),
            binary(row.peak_reserved_bytes),
            percent(row.fragmentation),
            percent(row.internal_fragmentation),
            binary(row.largest_free_bytes),
            f"{row.driver_calls:,}",
            *([] if row.fits is None else ["yes" if row.fits else "no"]),
            f"{row.seconds:.2f}",
        ]
        for row in rows
    ]
    load = binary(rows[0].peak_load_bytes)
    table(f"{file}, device {device}: peak load {load}", header, lines)
    for row in rows:
        if row.failed_at is not None:
            console().print(_failure(row, limit_bytes or 0), markup=False)


def _name(row: Row) -> str:
    """As it is written behind ``-a``."""
    if row.settings.keys() == {"conf"}:
        return f"{row.allocator}:{row.settings['conf']}"
    settings = ",".join(f"{key}={value}" for key, value in row.settings.items())
    return f"{row.allocator}:{settings}" if settings else row.allocator


def _failure(row: Row, limit_bytes: int) -> str:
    failed = row.failed_at
    assert failed is not None
    operation = f" in {failed.operation}" if failed.operation else ""
    return (
        f"{_name(row)} runs out of {binary(limit_bytes)} at event {failed.event:,}{operation}, "
        f"which asks for {binary(failed.size_bytes)}"
    )


def _summary(found: list[Compared], limit_bytes: int | None) -> None:
    """Of each allocator the file in which it reserves most, and in how many it runs out of memory."""
    rows: dict[str, list[tuple[str, Row]]] = {}
    for one in found:
        for row in one.rows:
            rows.setdefault(_name(row), []).append((one.file, row))
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
                f"{file}, device {worst.device}",
                *([] if limit_bytes is None else [f"{out} of {len(members)}"]),
            ]
        )
    header = ["allocator", "least reserved", "most reserved", "where most"]
    table("all files", header + ([] if limit_bytes is None else ["out of memory"]), lines)

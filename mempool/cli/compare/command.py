"""``mempool compare``: compare allocators on recorded traces."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mempool.cli.compare.render import answers, errors, print_results
from mempool.cli.options import Lenient, allocators, parsed
from mempool.cli.output import ExitCode, Stop, bar, error_line, print_json, progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mempool.analysis.compare import AllocatorSpec
    from mempool.analysis.compare_many import FileComparison


#: Smallest limit without a unit, in bytes: the smallest block of a recorded allocator. Small programs are
#: compared at such limits.
_SMALLEST_BLOCK_BYTES = 512


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
            autocompletion=allocators("recorded"),
            help="Compare these only; again for each. Settings are KEY=VALUE, with commas between them.",
        ),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Tell who runs out of so much memory, when and on what: 24GiB."),
    ] = None,
    lenient: Lenient = False,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list of objects, one a row.")] = False,
) -> None:
    """Replay recorded traces through other allocators, and compare how much each would have reserved.

    For example:

        mempool compare snapshot.pickle
        mempool compare run.trace --limit 24GiB
        mempool compare run.trace -a recorded -a pytorch:max_split_size_mb=128 -a planned
        mempool compare 'runs/*/rank*.pickle' --json
    """
    from mempool.analysis.compare import FailedComparison, parse_allocator
    from mempool.cli.inputs import print_skipped
    from mempool.units import parse_memory

    named = [parsed("--allocator", parse_allocator, text) for text in allocator or ()]
    specs = [spec for spec in named if spec is not None] or None
    limit_bytes = parsed("--limit", lambda text: parse_memory(text, _SMALLEST_BLOCK_BYTES), limit)
    paths = _paths(files)
    results = []
    for result in _compared(paths, specs, limit_bytes, lenient=lenient):
        results.append(result)
        print_skipped(result.file, result.skipped)
        for text in errors(result):
            error_line(text)
    results.sort(key=lambda result: paths.index(result.file))
    if json:
        print_json([row for result in results for row in answers(result)])
    else:
        print_results(results, limit_bytes)
    if any(result.error is not None for result in results):
        raise Stop(ExitCode.FILE)
    if any(isinstance(row, FailedComparison) for result in results for row in result.rows):
        raise Stop(ExitCode.USAGE)


def _paths(given: Sequence[str]) -> list[str]:
    """Return the files without duplicates; a glob pattern that names no existing file is expanded."""
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


def _compared(
    paths: list[str],
    specs: Sequence[AllocatorSpec] | None,
    limit_bytes: int | None,
    *,
    lenient: bool,
) -> Iterator[FileComparison]:
    from mempool.analysis.compare_many import compare_files

    options: dict[str, Any] = {"limit_bytes": limit_bytes, "lenient": lenient}
    if len(paths) == 1:
        title = f"comparing {paths[0]}"
        with progress(title) as say:
            yield from compare_files(
                paths, specs, **options, on_activity=lambda activity: say(f"{title}: {activity}")
            )
        return
    with bar(f"comparing {len(paths)} files") as show:
        for done, result in enumerate(compare_files(paths, specs, **options), 1):
            show(done, len(paths))
            yield result

"""``mempool compare``: compare allocators on recorded traces."""

from __future__ import annotations

import contextlib
import glob
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mempool.cli.compare.render import answers, errors, show
from mempool.cli.options import Lenient, allocators
from mempool.cli.output import ExitCode, Stop, bar, error_line, print_json, progress
from mempool.cli.parsing import parsed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor

    from mempool.analysis.compare import Choice
    from mempool.analysis.compare_many import Compared


#: Smallest limit without a unit that is accepted, in bytes: no recorded allocator hands out smaller blocks,
#: and traces of small programs are compared at such limits.
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
    dask: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS", help="Work on a Dask cluster, which must see the files: tcp://host:8786."
        ),
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
        mempool compare 'runs/*/rank*.pickle' --dask tcp://scheduler:8786
    """
    from mempool.analysis.allocator_specs import parse_choice
    from mempool.analysis.compare import Unable
    from mempool.cli.inputs import tell_skipped
    from mempool.units import parse_memory

    named = [parsed("--allocator", parse_choice, text) for text in allocator or ()]
    choices = [choice for choice in named if choice is not None] or None
    limit_bytes = parsed("--limit", lambda text: parse_memory(text, _SMALLEST_BLOCK_BYTES), limit)
    paths = _paths(files)
    found = []
    with _executor(dask) as executor:
        for one in _compared(paths, choices, limit_bytes, executor, lenient=lenient):
            found.append(one)
            tell_skipped(one.file, one.skipped)
            for text in errors(one):
                error_line(text)
    found.sort(key=lambda one: paths.index(one.file))
    if json:
        print_json([row for one in found for row in answers(one)])
    else:
        show(found, limit_bytes)
    if any(one.error is not None for one in found):
        raise Stop(ExitCode.FILE)
    if any(isinstance(row, Unable) for one in found for row in one.rows):
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
    from mempool.analysis.compare_many import compare_files

    options: dict[str, Any] = {"limit_bytes": limit_bytes, "lenient": lenient, "executor": executor}
    if len(paths) == 1:
        what = f"comparing {paths[0]}"
        with progress(what) as say:
            yield from compare_files(paths, choices, **options, told=lambda now: say(f"{what}: {now}"))
        return
    with bar(f"comparing {len(paths)} files") as told:
        for done, one in enumerate(compare_files(paths, choices, **options), 1):
            told(done, len(paths))
            yield one

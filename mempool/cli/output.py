"""Output shared by all verbs: exit codes, the error line, JSON objects, tables, progress."""

from __future__ import annotations

import enum
import importlib.util
import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mempool.cli.output_files import write_obstacle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console
    from rich.text import Text

#: Width of a file or pipe in columns: more than any table has.
_NO_WIDTH = 10_000


class ExitCode(enum.IntEnum):
    """Exit codes of the command; a public interface, see docs/cli.md."""

    OK = 0
    NEGATIVE = 1  #: the command succeeded, and its answer is "no"
    USAGE = 2  #: the command line is wrong
    FILE = 3  #: a file cannot be read or written, or has the wrong content
    FAILED = 4  #: any other failure: no memory, a fault of this project
    INTERRUPTED = 130  #: Ctrl-C
    PIPE = 141  #: the reader of the output has closed the pipe


class Stop(Exception):  # noqa: N818 - it ends a verb, it is not always an error
    """End of a verb with an exit code and, unless empty, a line on stderr."""

    def __init__(self, code: ExitCode, message: str = "") -> None:
        super().__init__(message)
        self.code = code


def require_bokeh(who: str) -> None:
    """Stop if Bokeh is not installed, for verbs and options that draw."""
    if importlib.util.find_spec("bokeh") is None:
        raise Stop(
            ExitCode.FAILED, f"{who} draws with bokeh, which is not installed: pip install 'mempool[show]'"
        )


def require_writable(path: Path) -> None:
    """Stop if no file can be written at a path, before long work."""
    if reason := write_obstacle(path):
        raise Stop(ExitCode.FILE, f"{path}: {reason}")


def error_line(message: str) -> None:
    """Write a message as one line to stderr, without interpreting markup."""
    print("mempool:", " ".join(message.split()), file=sys.stderr)  # noqa: T201


def print_json(answer: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Write the answer of ``--json`` to stdout: one object, or one list of objects."""
    print(json.dumps(answer, indent=2))  # noqa: T201


def write_json(answer: Mapping[str, Any], path: str) -> None:
    """Write the object of ``--json FILE`` atomically: the whole file or none."""
    from traces.files import atomic

    with atomic(path) as temporary:
        temporary.write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")


def percent(fraction: float) -> str:
    """Return a fraction as percent."""
    return f"{100 * fraction:.2f} %"


def console() -> Console:
    """Return the console of stdout, without a width limit for a file or pipe."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, soft_wrap=True, width=_NO_WIDTH)


def plain(text: str) -> Text:
    """Return text without markup, with numbers for unencodable characters."""
    from rich.text import Text

    return Text(text.encode("utf-8", "backslashreplace").decode())


def facts(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a table of two columns: name and value."""
    from rich.table import Table

    table = Table(title=plain(title), title_justify="left", show_header=False, box=None, pad_edge=False)
    for name, text in rows:
        table.add_row(plain(name), plain(text))
    console().print(table)


def print_caveats(title: str, sentences: Sequence[str]) -> None:
    """Print the caveats of a file, before any results."""
    for sentence in sentences:
        console().print(plain(f"{title}: {sentence}"))


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, fold: int = 0) -> None:
    """Print a table; except for the first column and ``fold``, columns are right-aligned numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    grid = Table(
        title=plain(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for column, name in enumerate(header):
        grid.add_column(
            name, justify="left" if column in (0, fold) else "right", overflow="fold", no_wrap=column != fold
        )
    for row in rows:
        grid.add_row(*map(plain, row))
    console().print(grid)


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show a line on a terminal's stderr while the block runs; yield a function that changes the line."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(plain(text)) as status:
        yield lambda new: status.update(plain(new))


@contextmanager
def bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal's stderr while the block runs.

    Yields a function that takes the amount done and the total; the total is 0 if unknown.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(plain(text).plain, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total or None)

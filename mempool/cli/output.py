"""What all verbs share in speaking: exit codes, the error line, one JSON object, tables, progress."""

from __future__ import annotations

import enum
import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import Console
    from rich.text import Text

#: Columns of a file or pipe: more than any table has.
_NO_WIDTH = 10_000


class ExitCode(enum.IntEnum):
    """What the command returns to the shell; an interface, see docs/cli.md."""

    OK = 0
    NEGATIVE = 1  #: the command worked and the answer is no
    USAGE = 2  #: the command line is wrong
    FILE = 3  #: a file cannot be read, cannot be written, or is not what it says it is
    FAILED = 4  #: anything else: no memory, a fault of ours
    INTERRUPTED = 130  #: Ctrl-C
    PIPE = 141  #: nobody reads the output any more


class Stop(Exception):  # noqa: N818 - it ends a verb, it is not always an error
    """Ends a verb with an exit code and, unless empty, one line on stderr."""

    def __init__(self, code: ExitCode, message: str = "") -> None:
        super().__init__(message)
        self.code = code


def error_line(message: str) -> None:
    """Write one line to stderr, whatever the message holds."""
    print("mempool:", " ".join(message.split()), file=sys.stderr)  # noqa: T201


def print_json(answer: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Write what ``--json`` asks for to stdout: one object, or one list of them."""
    print(json.dumps(answer, indent=2))  # noqa: T201


def write_json(answer: Mapping[str, Any], path: str) -> None:
    """Write the one object of ``--json FILE``, whole or not at all."""
    from traces.files import atomic

    with atomic(path) as beside:
        beside.write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")


def percent(fraction: float) -> str:
    """A fraction as percent."""
    return f"{100 * fraction:.2f} %"


def console() -> Console:
    """The terminal, or the file or pipe in its place, which has no width."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, soft_wrap=True, width=_NO_WIDTH)


def plain(text: str) -> Text:
    """Text of others as it is: nothing in it is markup, and what cannot be written is told by its number."""
    from rich.text import Text

    return Text(text.encode("utf-8", "backslashreplace").decode())


def facts(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print a table of two columns: what, and how much."""
    from rich.table import Table

    table = Table(title=plain(title), title_justify="left", show_header=False, box=None, pad_edge=False)
    for what, text in rows:
        table.add_row(plain(what), plain(text))
    console().print(table)


def tell_caveats(title: str, sentences: Sequence[str]) -> None:
    """Print facts that are missing in a file, before anything that follows from the others."""
    for sentence in sentences:
        console().print(plain(f"{title}: {sentence}"))


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *, fold: int = 0) -> None:
    """Print a table; all columns but the first and that which may ``fold`` are numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    grid = Table(
        title=plain(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for at, name in enumerate(header):
        grid.add_column(
            name, justify="left" if at in (0, fold) else "right", overflow="fold", no_wrap=at != fold
        )
    for row in rows:
        grid.add_row(*map(plain, row))
    console().print(grid)


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show a line on stderr while the block runs, if that is a terminal; yields what changes it."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(plain(text)) as status:
        yield lambda new: status.update(plain(new))


@contextmanager
def bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr while the block runs, if that is a terminal.

    Yields what takes how much is done and how much there is; 0 for the latter if it is not known.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _all: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(plain(text).plain, total=None)
        yield lambda done, everything: shown.update(task, completed=done, total=everything or None)

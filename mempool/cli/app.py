"""The typer application and the only place where errors become exit codes."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import typer

from mempool.cli import check, convert, demo, diagnose, plan, show
from mempool.cli.compare.command import compare
from mempool.cli.fit.command import fit
from mempool.cli.help import Command, Group
from mempool.cli.info.command import info
from mempool.cli.output import ExitCode, Stop, error_line
from mempool.cli.rehearse.command import rehearse
from mempool.cli.run.command import CONTEXT, RunCommand, run
from mempool.cli.swap.command import swap

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer(
    name="mempool",
    cls=Group,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=Command)(demo.demo)
app.command(cls=RunCommand, context_settings=CONTEXT)(run)
app.command(cls=Command)(plan.plan)
app.command(cls=Command)(check.check)
app.command(cls=Command)(info)
app.command(cls=Command)(compare)
app.command(cls=Command)(fit)
app.command(cls=RunCommand, context_settings=CONTEXT)(rehearse)
app.command(cls=Command)(convert.convert)
app.command(cls=Command)(show.show)
app.command(cls=Command)(swap)
app.command(cls=Command)(diagnose.diagnose)


@app.callback(invoke_without_command=True)
def _options(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),  # noqa: FBT001, FBT003
) -> None:
    if version:
        from importlib.metadata import version as installed

        print("mempool", installed("mempool"))  # noqa: T201
        raise typer.Exit


def call(arguments: Sequence[str]) -> int:
    """Run one command line.

    Returns:
        The exit code; an error has been reported in one line on stderr.
    """
    try:
        code = typer.main.get_command(app).main(
            list(arguments) or ["--help"], prog_name="mempool", standalone_mode=False
        )
        sys.stdout.flush()
    except SystemExit as end:
        # Raised by typer, which exits with 1 for a closed pipe; here, 1 means "the answer is no".
        if isinstance(end.__context__, BrokenPipeError):
            return ExitCode.PIPE
        raise
    except BrokenPipeError:
        # Otherwise Python reports the closed pipe again at exit, when it flushes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.PIPE
    except (KeyboardInterrupt, typer.Abort):
        error_line("interrupted")
        return ExitCode.INTERRUPTED
    except Exception as error:
        if os.environ.get("MEMPOOL_TRACEBACK"):
            raise
        code, message = judge(error)
        if message:
            error_line(message)
    else:
        if code == ExitCode.INTERRUPTED:  # typer returns this code for Ctrl-C
            error_line("interrupted")
    return code if isinstance(code, int) else ExitCode.OK


def judge(error: Exception) -> tuple[int, str]:
    """Return exit code and message line for an error that a verb did not handle."""
    if isinstance(error, Stop):
        return error.code, str(error)
    if hasattr(error, "format_message"):  # an error of typer, whose class is not public
        where = getattr(getattr(error, "ctx", None), "command_path", "mempool")
        return ExitCode.USAGE, f"{error.format_message()} (see '{where} --help')"
    from solvers import PlanError
    from traces import TraceError

    if isinstance(error, (TraceError, PlanError)):
        return ExitCode.FILE, str(error)
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename is not None else ""
        return ExitCode.FILE, f"{name}{error.strerror or error}"
    if isinstance(error, MemoryError):
        return ExitCode.FAILED, f"out of memory: {error}" if str(error) else "out of memory"
    return ExitCode.FAILED, f"{type(error).__name__}: {error} (MEMPOOL_TRACEBACK=1 shows where)"

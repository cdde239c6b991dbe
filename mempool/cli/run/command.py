"""``mempool run``: run an unchanged program under the pool.

The command replaces its process by a plain Python that runs the program, so that arguments, exit status,
signals, ``__main__``, child processes and tracebacks are Python's own. `sitecustomize` (in the folder
startup/) loads `mempool.cli.run.child`, which waits until the program imports a framework.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mempool.cli.help import Command
from mempool.cli.options import parsed
from mempool.cli.output import ExitCode, Stop, require_bokeh, require_writable
from mempool.cli.output_files import overwritten_file
from mempool.cli.run import exec as launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.settings import Settings

CONTEXT: dict[str, Any] = {"allow_interspersed_args": False}


class RunCommand(Command):
    """Command whose options end at the program's command line, like Python's own options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options of ``run`` up to the script, ``-m`` or ``-c``."""
        takes_value = {
            name for option in self.params if not getattr(option, "is_flag", True) for name in option.opts
        }
        return super().parse_args(ctx, split(args, takes_value))


def split(args: list[str], takes_value: set[str]) -> list[str]:
    """Insert ``--`` before the program: a script, ``-m MODULE`` or ``-c CODE``."""
    at = 0
    while at < len(args) and args[at].startswith("-") and args[at] not in ("-", "--"):
        if args[at][:2] in ("-m", "-c"):
            break
        at += 2 if args[at] in takes_value else 1
    if at < len(args) and args[at] == "--":
        at += 1
    return [*args[:at], "--", *args[at:]] if args[at - 1 : at] != ["--"] else args


def run(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT|-m MODULE|-c CODE",
            help="The program and its arguments.",
            show_default=False,
        ),
    ],
    *,
    record: Annotated[
        Path | None, typer.Option(metavar="TRACE", help="Write a trace of every allocation.")
    ] = None,
    accesses: Annotated[
        bool,
        typer.Option(
            "--accesses",
            help="In that trace also what PyTorch's operations read and write, by module and phase. Slower; "
            "compiled functions run as if they were not.",
        ),
    ] = False,
    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Replay this plan from the first iteration.")
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option("--fresh", help="Do not start from the plan of this program's last run."),
    ] = False,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="First rehearse some steps without the GPU, so that PyTorch's first step has a plan.",
        ),
    ] = False,
    max_reserved: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most memory to hold: 512M, 1.5GiB, 2GB.")
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Most memory of PyTorch's tensors on the device, or such as 80% of the first iteration's "
            "peak; idle tensors are offloaded to the host.",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="pluggable|guest",
            help="Of PyTorch on a GPU: the pool in place of PyTorch's allocator, or in front of it; by "
            "default in front where possible.",
        ),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="End with a table of the pool's numbers too.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="PAGE", help="Write a page of the memory by step: memory.html. Needs Bokeh."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what did not follow the plan, and why.")
    ] = False,
    children: Annotated[
        bool,
        typer.Option(
            "--children", help="Child processes too; each trace has the process number in its name."
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Say nothing, neither at the end nor meanwhile.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report as one JSON object.")
    ] = None,
) -> None:
    """Run an unchanged program with the pool under it; say on stderr at the end what the pool did.

    The pool detects the iteration automatically, and keeps the plan for the next
    run of the program, which follows it from the first iteration. Options of
    mempool precede the script; everything after the script belongs to the
    program. The exit status is the program's.

    For example:

        mempool run train.py --epochs 3
        mempool run --record run.trace -m package.train
        mempool run --record run.trace --accesses train.py
        mempool run --limit 12GiB train.py
        mempool run --plot memory.html train.py
        mempool run --plan run.plan --explain train.py
        mempool run --rehearse train.py
    """
    if accesses and record is None:
        raise typer.BadParameter("--accesses needs --record TRACE")
    from mempool.units import parse_memory

    sizes = (("--max-reserved", max_reserved), ("--limit", limit))
    for option, size in sizes:
        refuse_space(option, size, program)
    _check_program(program)
    for option, size in sizes:
        if not (option == "--limit" and size is not None and size.endswith("%")):
            parsed(option, parse_memory, size)
    chosen = _settings(record=record, plan=plan, max_reserved=max_reserved, limit=limit, backend=backend)
    record, plan = (None if name is None else Path(name) for name in (chosen.record, chosen.plan))
    kept = launch.files_of(program) + ([] if plan is None else [plan])
    if (output := overwritten_file(kept, (record, plot, json_file))) is not None:
        raise Stop(ExitCode.USAGE, f"{output} would be written over")
    if plot is not None:
        require_bokeh("--plot")
    if rehearse:
        _check_rehearsal(chosen, fresh=fresh)
        from mempool.cli.run.rehearsed_plan import rehearse_plan

        rehearse_plan(program, memory=chosen.memory or "growing", quiet=quiet)
    launch.start(
        program,
        record=_writable(record),
        **_plan(plan),
        json_file=_writable(json_file),
        plot=_writable(plot),
        max_reserved=None if max_reserved is None else chosen.max_reserved,
        limit=None if limit is None else chosen.limit,
        # a rehearsed plan is for the pluggable backend
        backend="pluggable" if rehearse else None if backend is None else chosen.backend,
        accesses=accesses,
        fresh=fresh,
        report=report,
        explain=explain,
        children=children,
        quiet=quiet,
    )


def _check_rehearsal(chosen: Settings, *, fresh: bool) -> None:
    """Refuse options and environment variables that prevent the use of a rehearsed plan."""
    from mempool.per_rank_files import rank

    if chosen.plan is not None or fresh or chosen.limit is not None:
        raise typer.BadParameter(
            "--rehearse gives the plan: leave --plan, --fresh and --limit out, and their variables"
        )
    if os.environ.get("MEMPOOL_REMEMBER", "").strip() and chosen.remember is not True:
        raise typer.BadParameter("the run follows no rehearsed plan: leave MEMPOOL_REMEMBER out")
    if chosen.mode != "replay":
        raise typer.BadParameter(f"the run follows no plan with MEMPOOL={chosen.mode}: leave --rehearse out")
    if rank() is not None:
        raise typer.BadParameter(
            "a rank's rehearsal would join another rank's run: leave --rehearse out under torchrun"
        )
    if chosen.backend == "guest":
        raise typer.BadParameter("a rehearsal's plan is of the other backend: leave --backend guest out")
    if chosen.memory == "managed":
        raise typer.BadParameter("a rehearsal has no managed memory: leave MEMPOOL_MEMORY out")


def _check_program(program: Sequence[str]) -> None:
    """Refuse an unknown option in place of the program, and invalid files."""
    if program[0].startswith("-") and program[0][:2] not in ("-m", "-c") and program[0] != "-":
        raise typer.BadParameter(f"no such option: {program[0]}")
    check_files(program)


def check_files(program: Sequence[str]) -> None:
    """Refuse a missing script, and a file that hides one of this project's packages."""
    if not launch.exists(program[0]):
        raise Stop(ExitCode.FILE, f"{program[0]}: No such file or directory")
    if (hidden := launch.hidden_package(program)) is not None:
        name, file = hidden
        raise Stop(ExitCode.USAGE, f"{file} hides the package {name!r} of mempool; rename it")


def _writable(path: Path | None) -> str | None:
    """Return the absolute path, since the program may change its folder; refuse an unwritable path."""
    if path is None:
        return None
    require_writable(path)
    return str(path.absolute())


def _plan(path: Path | None) -> dict[str, str]:
    """Return the path and the client of a valid plan."""
    if path is None:
        return {}
    from mempool import _core
    from mempool.per_rank_files import file_to_read
    from mempool.planning.plan_files import read_plans
    from solvers import read_plan

    own = file_to_read(str(path))
    alignment = _core.HostDevice().alignment
    offsets = [planned.plan.offset for planned in read_plans(own).plans]
    if any(bool((offset[offset >= 0] % alignment).any()) for offset in offsets if offset is not None):
        why = (
            f"its offsets are not multiples of {alignment}; make it by `mempool plan --alignment {alignment}`"
        )
        raise Stop(ExitCode.FILE, f"{own}: {why}")
    return {"plan": str(path.absolute()), "plan_client": read_plan(own)[2].get("client", "")}


def _settings(**given: Any) -> Settings:
    """Return the settings of command line and environment; report errors before the start."""
    from mempool.errors import UsageError
    from mempool.settings import check_swapping, settings

    try:
        chosen = settings(**given)
        check_swapping(chosen)
        return chosen
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None


def refuse_space(option: str, size: str | None, program: Sequence[str]) -> None:
    """Refuse a size with a space, such as 12 GB, whose unit would be taken for the program.

    Raises:
        typer.BadParameter: the program is a unit, and no file.
    """
    from mempool.units import is_unit

    if size is not None and size.isdigit() and is_unit(program[0]) and not launch.exists(program[0]):
        raise typer.BadParameter(f"a size has no space here: say {option} {size}{program[0]}")

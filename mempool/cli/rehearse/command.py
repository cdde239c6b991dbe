"""``mempool rehearse``: run an unchanged CUDA program of PyTorch's on a machine without a GPU."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from pathlib import Path  # noqa: TC003 - typer reads it from the signature
from typing import TYPE_CHECKING, Annotated

import typer

from mempool.cli.fit.command import complete_cards
from mempool.cli.options import completion
from mempool.cli.output import ExitCode, Stop, error_line, print_json, require_writable
from mempool.cli.run.child import DEADLY
from mempool.cli.run.command import check_files, refuse_space

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mempool.cli.rehearse.arguments import Request
    from mempool.offline import InputFile
    from mempool.rehearsal import StandInRunner


def complete_allocators(incomplete: str) -> list[str]:
    """Complete the last name in a list of allocators."""
    from mempool.rehearsal import ALLOCATORS

    named, _, last = incomplete.rpartition(",")
    return [",".join(filter(None, (named, name))) for name in ALLOCATORS if name.startswith(last)]


def rehearse(
    program: Annotated[
        list[str],
        typer.Argument(
            metavar="SCRIPT|-m MODULE",
            help="The program and its arguments.",
            show_default=False,
        ),
    ],
    *,
    steps: Annotated[
        int, typer.Option(min=1, metavar="N", help="End the program after so many optimizer steps.")
    ] = 4,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            metavar="S",
            help="End the program after so many seconds, for programs without optimizer.",
        ),
    ] = None,
    card: Annotated[
        str | None,
        typer.Option(metavar="NAME", autocompletion=complete_cards, help="The GPU: 'RTX 4090', 'A100 80GB'."),
    ] = None,
    devices: Annotated[int, typer.Option(min=1, max=64, metavar="N", help="GPUs of the machine.")] = 1,
    limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE|PERCENT",
            help="Most memory that PyTorch's allocator may hold: 24GiB; and what offloading costs.",
        ),
    ] = None,
    allocator: Annotated[
        str,
        typer.Option(
            "-a",
            "--allocator",
            metavar="NAME[,NAME...]",
            autocompletion=complete_allocators,
            help="native, expandable, async, mempool, mempool-plain; several make a table.",
        ),
    ] = "native",
    vary: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=V[,V...]",
            help="Run once for each value of an argument of the program: batch_size=8,16,32.",
        ),
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=1, metavar="N", help="Run as rank 0 of N training processes (DDP, FSDP).")
    ] = 1,
    values: Annotated[
        str,
        typer.Option(
            metavar="zero|random",
            autocompletion=completion("zero", "random"),
            help="The values that the program reads from the device.",
        ),
    ] = "zero",
    select: Annotated[
        str,
        typer.Option(
            metavar="none|all",
            autocompletion=completion("none", "all"),
            help="The elements that masks select whose values are unknown.",
        ),
    ] = "none",
    check_streams: Annotated[
        bool,
        typer.Option(
            "--check-streams", help="Find memory that two streams use without an event or record_stream."
        ),
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a trace of every allocation, with lines and modules."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Let the pool replay this plan from the first step.")
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(min=1, metavar="S", help="End a program that makes no step for so many seconds."),
    ] = 600,
    allow_writes: Annotated[
        bool,
        typer.Option("--allow-writes", help="Let the program change, make and remove files."),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Show the program's output only if it fails.")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; of several runs a list.")
    ] = False,
) -> None:
    """Run a CUDA program without a GPU, and tell what memory it would hold.

    PyTorch's own CUDA build runs, with its own allocator, on libraries that stand in
    for CUDA's: memory is address space, and kernels do nothing. The program ends after
    some steps. Options of mempool precede the script; everything after it belongs to
    the program. What the program prints goes to stderr.

    For example:

        mempool rehearse train.py --batch_size=8
        mempool rehearse --card "RTX 4090" -a native,expandable train.py
        mempool rehearse --vary batch_size=8,16,32 --card "A100 40GB" train.py
        mempool rehearse --ranks 8 train_ddp.py
        mempool rehearse --seconds 20 -m package.serve
        mempool rehearse --trace step.trace train.py && mempool show step.trace
    """
    from mempool.cli.rehearse.arguments import parse_request

    refuse_space("--limit", limit, program)
    rehearse_request(parse_request(locals()), trace, json=json)


def rehearse_request(request: Request, trace: Path | None, *, json: bool) -> None:
    """Rehearse all runs of a request, and print the result.

    Raises:
        Stop: the program cannot be rehearsed, fails, or does not fit.
    """
    if trace is not None:
        require_writable(trace)
    check_program(request.program)
    from mempool.cli.rehearse import render
    from mempool.cli.rehearse.runs import rehearse_all
    from mempool.rehearsal import standin

    if standin.has_gpu():
        error_line("this machine has a GPU, which the rehearsal does not touch")
    with runner_of_command() as runner:
        runs = list(rehearse_all(request, runner))
        if json:
            objects = [render.to_json(run, request) for run in runs]
            print_json(objects if request.several else objects[0])
        else:
            render.show(runs, request, runner.installation)
        if trace is not None and runs[0].recording is not None:
            _write_trace(runs[0].recording, trace)
    if any(run.failed for run in runs):
        raise Stop(ExitCode.FAILED)
    if not any(run.fits for run in runs):
        raise Stop(ExitCode.NEGATIVE)


def check_program(program: Sequence[str]) -> None:
    """Refuse a missing program, code as an argument, and a file that hides one of this project's packages."""
    if program[0].startswith("-") and (program[0][:2] != "-m" or list(program) == ["-m"]):
        raise typer.BadParameter(f"a rehearsal is of a script or of -m MODULE, not of {program[0]}")
    check_files(program)


@contextmanager
def runner_of_command() -> Iterator[StandInRunner]:
    """Yield a runner; SIGTERM and SIGHUP also end its program, and remove its folder and new checkpoints.

    Raises:
        Stop: the machine or the installed PyTorch does not support rehearsals.
    """
    from mempool.errors import UsageError
    from mempool.rehearsal import open_runner

    before = {number: signal.getsignal(number) for number in DEADLY}
    for number in (number for number, handler in before.items() if handler != signal.SIG_IGN):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with open_runner() as runner:
            yield runner
    except UsageError as error:
        raise Stop(ExitCode.FAILED, str(error)) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_trace(recording: InputFile, path: Path) -> None:
    from traces.formats.parquet import write_trace

    assert recording.whole_trace is not None
    write_trace(recording.whole_trace, path)

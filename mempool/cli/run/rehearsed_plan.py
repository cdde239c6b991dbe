"""``mempool run --rehearse``: make the plan of a program by a rehearsal, before the program runs."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

from mempool.cli.output import ExitCode, Stop, error_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: Optimizer steps of the rehearsal: enough for a plan of steps that differ in sizes, some seconds at most.
STEPS = 12


def rehearse_plan(program: Sequence[str], *, memory: str, quiet: bool) -> None:
    """Rehearse some steps and keep the plan where the run finds it; a rehearsal without a plan is reported.

    Args:
        program: the command line after Python; its output is dropped.
        memory: kind of GPU memory of the run's pool, whose plan this is.
        quiet: say nothing if all went well.
    """
    from mempool.cli.rehearse.command import check_program
    from mempool.errors import UsageError
    from mempool.rehearsal import Job, Machine, open_stage, standin
    from mempool.rehearsal.job import POOLS

    check_program(program)
    allocator = next(name for name, kind in POOLS.items() if kind == memory)
    try:
        with _exit_at_sigterm(), open_stage() as stage, open(os.devnull, "w") as nowhere:  # noqa: PTH123
            folder = str(stage.new_folder())
            job = Job(tuple(program), folder, allocator, steps=STEPS, history=False, remember=True)
            machine = Machine(own_capability=standin.present_capability())
            outcome = stage.run(job, machine, output=nowhere.fileno())
    except UsageError as error:
        raise Stop(ExitCode.FAILED, str(error)) from None
    if outcome.failed or not outcome.steps:
        reason = outcome.message or "it made no optimizer step"
        error_line(
            f"the rehearsal failed, so the run starts without its plan: {reason} {outcome.line}".strip()
        )
    elif not quiet:
        steps = "1 step" if outcome.steps == 1 else f"{outcome.steps} steps"
        error_line(f"rehearsed {steps} in {outcome.seconds:.1f} s: {'; '.join(outcome.notes)}")


@contextlib.contextmanager
def _exit_at_sigterm() -> Iterator[None]:
    """Raise `SystemExit` at SIGTERM, so that the rehearsed program and its folder are not left behind."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

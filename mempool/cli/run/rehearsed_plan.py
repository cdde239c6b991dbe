"""``mempool run --rehearse``: make the plan of a program by a rehearsal, before the program runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mempool.cli.output import ExitCode, Stop, error_line

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Optimizer steps of the rehearsal: enough for a plan of steps that differ in sizes, some seconds at most.
STEPS = 12


def rehearse_plan(program: Sequence[str], *, quiet: bool) -> None:
    """Rehearse some steps and keep the plan where the run finds it; a rehearsal without a plan is reported.

    Args:
        program: the command line after Python; its output is dropped.
        quiet: say nothing if all went well.
    """
    from mempool.cli.rehearse.command import check_program
    from mempool.errors import UsageError
    from mempool.rehearsal import Job, Machine, open_stage, standin

    check_program(program)
    try:
        with open_stage() as stage, open(os.devnull, "w") as nowhere:  # noqa: PTH123
            folder = str(stage.new_folder())
            job = Job(tuple(program), folder, "mempool", steps=STEPS, history=False, remember=True)
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
        error_line(f"rehearsed {outcome.steps} steps in {outcome.seconds:.1f} s: {'; '.join(outcome.notes)}")

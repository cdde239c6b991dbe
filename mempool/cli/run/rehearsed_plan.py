"""``mempool run --rehearse``: makes a program's plan by a rehearsal before the run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mempool.cli.output import error_line

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Optimizer steps of the rehearsal: enough for a plan of steps that differ in sizes, some seconds at most.
STEPS = 12


def rehearse_plan(program: Sequence[str], *, memory: str, quiet: bool) -> None:
    """Rehearse some steps, and keep the plan for the run; report a rehearsal without a plan.

    Args:
        program: the command line after Python; its output is dropped.
        memory: kind of GPU memory of the run's pool.
        quiet: no output on success.
    """
    from mempool.cli.rehearse.command import check_program, runner_of_command
    from mempool.rehearsal import Job, Machine, standin
    from mempool.rehearsal.job import POOLS

    check_program(program)
    allocator = next(name for name, kind in POOLS.items() if kind == memory)
    with runner_of_command() as runner, open(os.devnull, "w") as nowhere:  # noqa: PTH123
        folder = str(runner.new_folder())
        job = Job(tuple(program), folder, allocator, steps=STEPS, history=False, remember=True)
        machine = Machine(own_capability=standin.present_capability())
        outcome = runner.run(job, machine, output=nowhere.fileno())
    if outcome.failed or not outcome.steps:
        reason = f"{outcome.message or 'it made no optimizer step'} {outcome.line}".strip()
        said = "; ".join((reason, *outcome.notes))
        error_line(f"the rehearsal failed, so the run starts without its plan: {said}")
    elif not quiet:
        steps = "1 step" if outcome.steps == 1 else f"{outcome.steps} steps"
        error_line(f"rehearsed {steps} in {outcome.seconds:.1f} s: {'; '.join(outcome.notes)}")

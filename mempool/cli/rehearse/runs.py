"""Runs of a ``mempool rehearse`` request: each allocator with each value of the varied argument."""

from __future__ import annotations

import dataclasses
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mempool.cli.output import progress
from mempool.rehearsal import Job
from mempool.rehearsal.job import PYTORCH_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mempool.cli.rehearse.arguments import Request
    from mempool.offline import InputFile
    from mempool.rehearsal import Outcome, StandInRunner


#: Optimizer steps until the second schedule, which includes the optimizer's state, is followed.
_PLANNED_STEPS = 4


@dataclass(frozen=True)
class Run:
    """One run of the program.

    Attributes:
        value: value of the varied argument, or None.
        outcome: the measured memory.
        history: file of PyTorch's history of allocations, or None.
        memory_bytes: memory of the card; None without a card.
        within_limit: a run of the pool with offloading, if PyTorch's allocator exceeds the limit; else None.
    """

    value: str | None
    outcome: Outcome
    history: Path | None
    memory_bytes: int | None = None
    within_limit: Outcome | None = None

    @functools.cached_property
    def recording(self) -> InputFile | None:
        """The history of the fullest device, as `mempool info` reads it; None without a history."""
        # PyTorch's history lacks devices without reserved bytes, and `read_input` refuses absent devices.
        if self.history is None or self.outcome.peak_reserved_bytes == 0:
            return None
        from mempool.offline import read_input

        return read_input(self.history, whole=True, device=self.outcome.device)

    @property
    def processes(self) -> list[Outcome]:
        """Return the outcomes of the processes that requested device memory, the program's own first."""
        return [each for each in (self.outcome, *self.outcome.processes) if each.asked_device]

    @property
    def shared_bytes(self) -> dict[int, int]:
        """Return the peak bytes of all processes together on each device; empty for a single process."""
        devices = [each.device for each in self.processes]
        return {
            device: sum(each.device_bytes for each in self.processes if each.device == device)
            for device in dict.fromkeys(devices)
            if devices.count(device) > 1
        }

    @property
    def measured(self) -> bool:
        """Return true if a process of the program requested device memory."""
        return bool(self.processes)

    @property
    def lacks_memory(self) -> bool:
        """Return true if a request of a process failed."""
        return any(each.out_of_memory_in_step is not None for each in (self.outcome, *self.outcome.processes))

    @property
    def failed(self) -> bool:
        """Return true if the run has no result: the program failed for another reason, or held no memory."""
        return not self.measured or (self.outcome.failed and not self.lacks_memory)

    @property
    def fits(self) -> bool:
        """Return true if no request failed, and the processes fit together."""
        return self.measured and self.outcome.complete and not self.lacks_memory and not self.exceeded_devices

    @property
    def exceeded_devices(self) -> list[int]:
        """Return the devices on which the processes fit alone, but not together."""
        limit = self.memory_bytes
        return [device for device, size in self.shared_bytes.items() if limit is not None and size > limit]


def rehearse_all(request: Request, runner: StandInRunner) -> Iterator[Run]:
    """Run the program once for each value and allocator.

    Only the first run keeps a history, since the program's requests are the same in all runs.
    """
    first = True
    for value, program in request.programs():
        for allocator in request.allocators:
            folder = runner.new_folder()
            job = Job(
                program,
                str(folder),
                allocator=allocator,
                limit_bytes=request.limit_bytes,
                history=first,
                **request.options,
            )
            label = " ".join(filter(None, (allocator, value)))
            outcome, history = _run(runner, job, request, label), _existing(folder / "history.pickle")
            within = None
            if allocator == request.allocators[0] and _exceeds_limit(request, outcome):
                within = _run_within_limit(runner, job, request, label, compiled=outcome.compiles)
            gpu = request.machine.card
            yield Run(value, outcome, history, None if gpu is None else gpu.memory_bytes, within)
            first = False


def _exceeds_limit(request: Request, outcome: Outcome) -> bool:
    if outcome.failed or outcome.allocator not in PYTORCH_SETTINGS:
        return False
    return isinstance(request.limit, str) or (
        request.limit is not None and outcome.out_of_memory_in_step is not None
    )


def _run_within_limit(
    runner: StandInRunner, job: Job, request: Request, label: str, *, compiled: bool
) -> Outcome:
    """Repeat a job within the limit: compiled, or with a pool until a schedule is followed."""
    within = dataclasses.replace(
        job,
        folder=str(runner.new_folder()),
        allocator=job.allocator if compiled else "mempool",
        steps=max(job.steps, _PLANNED_STEPS),
        limit_bytes=None,
        offload_limit=request.limit,
        compiled=compiled,
        card=None if request.machine.card is None else request.machine.card.name,
        history=False,
        plan=None,
    )
    return _run(runner, within, request, f"{label} within the limit")


def _run(runner: StandInRunner, job: Job, request: Request, label: str) -> Outcome:
    if not request.quiet:
        return runner.run(job, request.machine)
    path = Path(job.folder) / "output.txt"
    with progress(f"rehearsing {job.program[0]}: {label}"), path.open("wb") as file:
        outcome = runner.run(job, request.machine, output=file.fileno())
    if outcome.failed:
        sys.stderr.write(path.read_text("utf-8", "replace"))
    return outcome


def _existing(path: Path) -> Path | None:
    return path if path.is_file() else None

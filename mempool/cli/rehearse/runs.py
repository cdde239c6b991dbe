"""The runs of one ``mempool rehearse``: each allocator with each value of the varied argument."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mempool.cli.output import progress
from mempool.rehearsal import Job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mempool.cli.rehearse.arguments import Request
    from mempool.offline import InputFile
    from mempool.rehearsal import Outcome, Stage


@dataclass(frozen=True)
class Run:
    """One run of the program.

    Attributes:
        value: value of the varied argument, or None.
        outcome: the measured memory.
        history: file of PyTorch's history of allocations, or None.
    """

    value: str | None
    outcome: Outcome
    history: Path | None

    @functools.cached_property
    def recording(self) -> InputFile | None:
        """The history as `mempool info` reads it, of the fullest device; None without one."""
        if self.history is None:
            return None
        from mempool.offline import read_input

        return read_input(self.history, whole=True, device=self.outcome.device)

    @property
    def measured(self) -> bool:
        """Return true if the program's own process held memory of a device."""
        return self.outcome.peak_reserved_bytes > 0

    @property
    def fits(self) -> bool:
        """Return true if the program ran without a lack of memory."""
        return self.measured and self.outcome.complete and self.outcome.out_of_memory_in_step is None


def rehearse_all(request: Request, stage: Stage) -> Iterator[Run]:
    """Run the program once for each value and allocator.

    Only the first run keeps a history: the others differ in what allocators hold, not in what the program
    asks for.
    """
    first = True
    for value, program in request.programs():
        for allocator in request.allocators:
            folder = stage.new_folder()
            job = Job(
                program,
                str(folder),
                allocator=allocator,
                limit_bytes=request.limit_bytes,
                history=first,
                **request.options,
            )
            label = " ".join(filter(None, (allocator, value)))
            yield Run(value, _run(stage, job, request, label), _existing(folder / "history.pickle"))
            first = False


def _run(stage: Stage, job: Job, request: Request, label: str) -> Outcome:
    if not request.quiet:
        return stage.run(job, request.machine)
    path = Path(job.folder) / "output.txt"
    with progress(f"rehearsing {job.program[0]}: {label}"), path.open("wb") as file:
        outcome = stage.run(job, request.machine, output=file.fileno())
    if outcome.failed:
        sys.stderr.write(path.read_text("utf-8", "replace"))
    return outcome


def _existing(path: Path) -> Path | None:
    return path if path.is_file() else None

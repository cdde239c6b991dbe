"""Device memory that a recorded job needs: reserved by an allocator, and the margins of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.analysis.compare import RECORDED, parse_allocator
from mempool.errors import UsageError
from mempool.simulate import simulate
from mempool.torch.estimate.margins import margins
from traces import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mempool.analysis.compare import AllocatorSpec
    from mempool.torch.estimate.training_step import Job
    from traces import Trace

#: Bytes; a device's allocator rounds sizes up to a multiple.
ROUNDED_TO = {"cuda": 512, "cpu": 1}
DEFAULT_ALLOCATORS = ("pytorch", "pytorch_expandable", "planned")


def choice_of(text: str) -> AllocatorSpec:
    """Return the allocator of a name, with settings behind a colon.

    Raises:
        UsageError: the name is unknown.
    """
    try:
        choice = parse_allocator(text)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if choice.allocator == RECORDED:
        raise UsageError("nothing was recorded of an allocator: the run has not been")
    return choice


def reserved(trace: Trace, allocators: Iterable[str]) -> dict[str, int]:
    """Return the peak bytes that each allocator would reserve on the device, over the whole trace.

    Args:
        trace: of a job, with unrounded sizes.
        allocators: names in `mempool.simulate.ALLOCATORS`, with settings behind a colon.

    Raises:
        UsageError: an allocator is unknown, or rejects its settings or the trace.
    """
    found = {}
    for text in allocators:
        choice = choice_of(text)
        try:
            made = simulate(trace, choice.allocator, **choice.settings)
        except (ValueError, TraceError) as error:
            raise UsageError(f"{text}: {error}") from None
        found[text] = made.peak_reserved_bytes
    return found


def margins_of(job: Job, trace: Trace) -> dict[str, int]:
    """Return a GPU's memory outside all recorded operations, by name, in bytes."""
    options: dict[str, Any] = {"capability": job.capability, "processes": job.processes}
    return margins(trace, job.device, **options, margin=job.margin)


def needed(job: Job, allocator: str) -> int:
    """Return the bytes that a job needs: reserved by an allocator, and the margins."""
    from mempool.torch.estimate.fake.fake_run import run

    trace = run(job)
    return reserved(trace, [allocator])[allocator] + sum(margins_of(job, trace).values())

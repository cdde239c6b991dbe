"""Estimate of a job: a fake run, the bytes that allocators would reserve, margins, the largest batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mempool.analysis.compare import RECORDED, parse_allocator
from mempool.errors import UsageError
from mempool.simulate import simulate
from mempool.torch.estimate.attribution import PeakAttribution, rounded
from mempool.torch.estimate.fake.fake_run import run
from mempool.torch.estimate.fake.isolation import shared_isolation
from mempool.torch.estimate.margins import margins
from mempool.torch.estimate.options import OPTIONS
from mempool.torch.estimate.result import ROUNDED_TO, Fit
from traces import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mempool.analysis.compare import AllocatorSpec
    from mempool.torch.estimate.job import Job
    from traces import Trace

DEFAULT_ALLOCATORS = ("pytorch", "pytorch_expandable", "planned")


class NoLargestBatchError(UsageError):
    """Error for a search that found no largest batch."""


def allocator_specs(allocators: Iterable[str]) -> dict[str, AllocatorSpec]:
    """Parse names of allocators, with optional settings behind a colon.

    Raises:
        UsageError: no name, or an unknown name.
    """
    try:
        found = {name: parse_allocator(name) for name in allocators}
    except ValueError as error:
        raise UsageError(str(error)) from None
    if not found:
        raise UsageError("no allocator: name one at least")
    if any(spec.allocator == RECORDED for spec in found.values()):
        raise UsageError("nothing was recorded of an allocator: the run has not been")
    return found


def reserved(trace: Trace, allocators: Iterable[str]) -> dict[str, int]:
    """Return the peak bytes that each allocator would reserve for the whole trace.

    Args:
        trace: trace of a job, with unrounded sizes.
        allocators: names in `mempool.simulate.ALLOCATORS`, with settings behind a colon.

    Raises:
        UsageError: an allocator is unknown, or rejects its settings or the trace.
    """
    found = {}
    for text, spec in allocator_specs(allocators).items():
        try:
            found[text] = simulate(trace, spec.allocator, **spec.settings).peak_reserved_bytes
        except (ValueError, TraceError) as error:
            raise UsageError(f"{text}: {error}") from None
    return found


@shared_isolation()
def estimate(
    job: Job,
    limit_bytes: int | None = None,
    *,
    allocators: Sequence[str] = DEFAULT_ALLOCATORS,
    progress: Callable[[str], object] = lambda _: None,
) -> Fit:
    """Estimate the memory that a job would need, by one run.

    Args:
        job: the step.
        limit_bytes: limit on the device memory.
        allocators: names of the allocators; the first decides the verdict.
        progress: function called with the name of each trial.

    Raises:
        UsageError: the job cannot be tried, or an allocator is unknown.
    """
    allocator_specs(allocators)
    warnings: dict[str, None] = {}
    progress(f"batch {job.batch:,}")
    trace = run(job, warn=lambda text: warnings.setdefault(text))
    fitted = judge(
        trace,
        limit_bytes,
        allocators=allocators,
        device=job.device,
        margin_bytes=margins(trace, job.device, capability=job.capability),
        batch=job.batch,
        mode=job.mode,
    )
    if fitted.first_step_bytes > fitted.peak_bytes:
        more = fitted.first_step_bytes - fitted.peak_bytes
        warnings.setdefault(f"the first step peaks {more:,} bytes higher than those that follow")
    return fitted.with_warnings(list(warnings))


@shared_isolation()
def with_largest_batch(job: Job, fit: Fit, *, progress: Callable[[str], object] = lambda _: None) -> Fit:
    """Add the largest batch that fits to a job's result, or a warning if there is none.

    Args:
        job: the job.
        fit: its result, with a limit.
        progress: called with the name of each trial.

    Raises:
        UsageError: a batch cannot be tried.
    """

    def needs(batch: int) -> int:
        if batch == job.batch:
            return fit.needed_bytes
        tried = estimate(job.replace(batch=batch), allocators=(fit.allocator,), progress=progress)
        return tried.needed_bytes

    try:
        found = largest(needs, fit.limit_bytes or 0, job.batch)
    except NoLargestBatchError as error:
        return replace(fit, warnings=[*fit.warnings, str(error)])
    return replace(fit, largest_batch=found)


def largest(needs: Callable[[int], int], limit_bytes: int, first: int = 1) -> int:
    """Return the largest batch that needs at most ``limit_bytes``; 0 if one sample needs more.

    Memory is assumed to grow with the batch. Memory is nearly affine in the batch, so between a batch that
    fits and a batch that does not, the search tries the intersection of the line through both with the limit;
    after a step that did not halve the interval, it tries the middle. Trials confirm that the result fits and
    that one more sample does not.

    Args:
        needs: bytes of a batch; called once for each batch.
        limit_bytes: available memory.
        first: first batch tried.

    Raises:
        NoLargestBatchError: the largest permitted batch fits, or the search exceeds its number of trials.
    """
    known = {0: 0}

    def fits(batch: int) -> bool:
        if len(known) > OPTIONS.batch_tries:
            raise NoLargestBatchError(
                f"no largest batch after {OPTIONS.batch_tries} tries: memory does not grow with the batch"
            )
        known[batch] = needs(batch)
        return known[batch] <= limit_bytes

    low, high = 0, first
    while fits(high):
        if high >= OPTIONS.batch:
            raise NoLargestBatchError(f"no largest batch: one of {high:,} still fits, and no more is tried")
        low, high = high, min(2 * high, OPTIONS.batch)
    slow = False
    while (between := high - low) > 1:
        share = 0.5 if slow else (limit_bytes - known[low]) / (known[high] - known[low])
        middle = min(max(low + int(share * between), low + 1), high - 1)
        low, high = (middle, high) if fits(middle) else (low, middle)
        slow = not slow and 2 * (high - low) > between
    return low


def judge(
    trace: Trace,
    limit_bytes: int | None,
    *,
    allocators: Sequence[str],
    device: str,
    margin_bytes: dict[str, int],
    batch: int | None,
    mode: str,
    whole: bool = False,
) -> Fit:
    """Judge a trace: its peak, the bytes that allocators reserve, and whether these bytes fit.

    Args:
        trace: trace of a job, with unrounded sizes.
        limit_bytes: limit on the device memory.
        allocators: names of the allocators; the first decides the verdict.
        device: "cuda" or "cpu".
        margin_bytes: memory outside all operations, by name.
        batch: samples in a batch; None if unknown.
        mode: as in the result.
        whole: count the first step, too.

    Raises:
        UsageError: an allocator is unknown, or rejects its settings or the trace.
    """
    found = PeakAttribution.of(rounded(trace, ROUNDED_TO[device]), whole=whole)
    reserved_by_allocator = reserved(trace, allocators)
    needed = reserved_by_allocator[allocators[0]] + sum(margin_bytes.values())
    return Fit(
        peak_bytes=found.peak.bytes,
        by_class_bytes=found.by_class_bytes(),
        by_module=found.by_module(),
        by_phase_bytes=found.by_phase_bytes,
        peak_operation=found.name(trace.operation),
        peak_phase=found.name(found.phase),
        peak_module=found.name(trace.module),
        first_step_bytes=found.first_step_bytes,
        reserved_bytes=reserved_by_allocator,
        margin_bytes=margin_bytes,
        allocator=allocators[0],
        batch=batch,
        mode=mode,
        device=device,
        limit_bytes=limit_bytes,
        fits=None if limit_bytes is None else needed <= limit_bytes,
        missing_bytes=None if limit_bytes is None else max(0, needed - limit_bytes),
        trace=trace,
    )

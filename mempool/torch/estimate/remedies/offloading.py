"""Savings and costs of a swap plan, computed by `solvers.swap` for the predicted step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mempool.hardware.gpu_throughput import DEFAULT, rates_of
from mempool.hardware.roofline import Roofline
from mempool.torch.estimate.attribution import rounded
from mempool.torch.estimate.fake.fake_run import run
from mempool.torch.estimate.options import OPTIONS
from mempool.torch.estimate.result import ROUNDED_TO, Fit, OffloadFigures, OffloadFindings, TriedRemedy
from mempool.units import binary
from solvers import Stop, solve
from solvers.swap import LinkBound, OffloadPlanner, parse_link, step_of
from solvers.swap.placement import device_buffers

if TYPE_CHECKING:
    from mempool.torch.estimate.job import Job
    from solvers.swap import Link, PlannedSchedule, Step

_NAME = "swapping"


def can_offload(job: Job) -> bool:
    """Return whether swapping can be planned for a job: training on CUDA."""
    return job.mode == "train" and job.device == "cuda"


def plan_offload(job: Job, fit: Fit) -> OffloadFindings | None:
    """Return the findings of the swap planner for a training step on CUDA; None for other jobs.

    Times are those of a device at full rates: a real device leaves more time for copies.

    Args:
        job: the job.
        fit: result of the job's fake run.

    Raises:
        UsageError, ValueError, solvers.errors.PlanError: the job cannot be tried, or no plan be made.
    """
    if not can_offload(job):
        return None
    rates = rates_of(job.card or DEFAULT, job.capability)
    named = job.link or rates.link
    link = parse_link(named)
    # Three steps: the second of them shows which buffers live into the next step.
    trace = rounded(run(job, 3, clock=Roofline(rates).nanoseconds), ROUNDED_TO[job.device])
    found = _StepPlanner(step_of(trace), link, sum(fit.margin_bytes.values()))
    floor, op = found.planner.floor()
    at_limit = slower = None
    if fit.limit_bytes is not None and fit.fits is False:
        at_limit = found.at(fit.limit_bytes)
    else:
        slower = found.within(OPTIONS.slowdown)
    return OffloadFindings(
        assumed=f"{rates}, a link like {named} ({_rates(link)})",
        step_seconds=found.step.duration,
        floor_bytes=floor,
        floor_operation=found.step.name(op),
        without_stall=found.reported(found.planner.without_stall()),
        slower=slower,
        at_limit=at_limit,
        fits=None
        if fit.limit_bytes is None
        else bool(fit.fits or (at_limit is not None and at_limit.needed_bytes <= fit.limit_bytes)),
    )


class _StepPlanner:
    """A step and a swap planner for the step."""

    def __init__(self, step: Step, link: Link, margin: int) -> None:
        self.step, self.margin = step, margin
        self.planner = OffloadPlanner(step, link, tries=OPTIONS.offload_orders)
        self._bound = LinkBound(step, link)

    def at(self, limit: int) -> OffloadFigures:
        """Return a schedule whose arena and margins fit the limit, or the smallest schedule found.

        At the limit much of a step is as full as possible, so fragmentation is higher than without swaps: the
        next attempt plans for a lower peak.
        """
        free = self.planner.without_stall()
        best = self._arena(free), free
        room = target_bytes = max(limit - self.margin, 0)
        for _ in range(OPTIONS.arena_attempts):
            if best[0] <= room:
                break
            swap = self.planner.nearest(target_bytes)
            arena = self._arena(swap)
            best = min(best, (arena, swap), key=lambda pair: pair[0])
            if swap.peak_bytes > target_bytes:  # no lower peak is feasible
                break
            target_bytes = int(target_bytes * min(room / max(arena, 1), 1))
        return self.reported(best[1], best[0])

    def within(self, slower: float) -> OffloadFigures:
        """Return roughly the lowest peak of a step that is longer by at most a share."""
        best = self.planner.without_stall()
        low, high = self.planner.floor()[0], best.peak_bytes
        for _ in range(OPTIONS.offload_halvings):
            found = self.planner.nearest((low + high) // 2)
            if found.stall_seconds <= slower * self.step.duration:
                best, high = found, min(high, found.peak_bytes)
            else:
                low = (low + high) // 2
        return self.reported(best)

    def _arena(self, swap: PlannedSchedule) -> int:
        buffers = device_buffers(self.step, swap.schedule)[0]
        return solve(buffers, stop=Stop(nodes=OPTIONS.arena_nodes), solver="search").arena_bytes

    def reported(self, swap: PlannedSchedule, arena: int | None = None) -> OffloadFigures:
        """Return the figures of a schedule to report."""
        did, duration = swap.replayed, max(self.step.duration, 1e-12)
        return OffloadFigures(
            needed_bytes=(arena or self._arena(swap)) + self.margin,
            peak_bytes=did.peak_bytes,
            slower=did.stall_seconds / duration,
            slowdown_bound=self._bound.stall_seconds(did.peak_bytes) / duration if did.stall_seconds else 0.0,
            swapped_bytes=did.returned_bytes,
            host_bytes=did.host_bytes,
        )


def offload_remedy(found: OffloadFindings, fit: Fit) -> TriedRemedy:
    """Return the findings as a remedy."""
    reported = found.reported
    reserved = reported.needed_bytes - sum(fit.margin_bytes.values())
    limit = f'"{-(-reserved // 2**20)}MiB"'  # the pool's limit, without the margins of a GPU
    how = f"buffers wait on the host, by plan: {binary(reported.swapped_bytes)} come back in a step of at "
    how += f"least {found.step_seconds * 1e3:,.0f} ms, which takes {reported.slower:.1%} longer"
    if reported.slower:
        how += f" (no schedule less than {reported.slowdown_bound:.1%})"
    how += f"; with {found.assumed}; slower ones of the former wait less"
    return TriedRemedy(
        name=_NAME,
        saves_bytes=fit.needed_bytes - reported.needed_bytes,
        how=how,
        code=f"import mempool.torch; pool = mempool.torch.install(limit={limit}); pool.watch(optimizer)",
        needed_bytes=reported.needed_bytes,
        peak_bytes=reported.peak_bytes,
        saves_peak_bytes=fit.peak_bytes - reported.peak_bytes,
        reserved_bytes=reserved,
        saves_reserved_bytes=fit.reserved_bytes[fit.allocator] - reserved,
        peak_phase="",
        peak_operation=found.floor_operation,
        fits=found.fits,
        cost="transfers",
        parts=(_NAME,),
    )


def _rates(link: Link) -> str:
    rates = [
        1e-9 / max(seconds_per_byte, 1e-15) for seconds_per_byte in (link.out_per_byte, link.in_per_byte)
    ]
    if abs(rates[0] - rates[1]) < 0.01 * rates[0]:
        return f"{rates[0]:.3g} GB/s each way" if link.duplex else f"{rates[0]:.3g} GB/s both ways together"
    return f"{rates[0]:.3g} GB/s out, {rates[1]:.3g} back"

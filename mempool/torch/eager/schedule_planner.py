"""Planner of offload schedules: makes schedules from recorded iterations, and improves them after waits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from mempool.logs import log
from mempool.torch.eager.patterns import OffloadSchedule, schedule_of
from mempool.torch.eager.recorded_iteration import RecordedIteration, recorded_step
from mempool.torch.offload.host_placement import host_copies
from mempool.torch.offload.options import OPTIONS
from mempool.units import sized, typed_size
from solvers import Stop, solve
from solvers.errors import PlanError
from solvers.swap import OffloadPlanner, advance_reloads, reduce_fragmentation, replay, tightened
from solvers.swap.placement import device_buffers

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from mempool.torch.eager.recorded_iteration import RecordedStep
    from mempool.torch.offload.engine import Engine
    from solvers.swap import PlannedSchedule, Schedule, Step


class SchedulePlanner:
    """Planner that makes offload schedules for a limit, and changes them."""

    def __init__(self, engine: Engine, host_bytes: int | None, alignment: int) -> None:
        """Prepare plans for an engine.

        Args:
            engine: copies between device and host.
            host_bytes: host memory for copies, bytes; None: no limit.
            alignment: alignment of offsets, bytes.
        """
        self._engine = engine
        self._alignment = alignment
        self._host_bytes = None if host_bytes is None else host_bytes - host_bytes // OPTIONS.host_gap_divisor
        self._warned = False
        self._failures = 0
        self._arenas: WeakKeyDictionary[Schedule, int] = WeakKeyDictionary()

    def plan_iteration(
        self, recording: RecordedIteration, before: OffloadSchedule | None, limit: int
    ) -> OffloadSchedule | None:
        """Make the schedule for an iteration and a limit, or the least feasible limit if that is higher.

        Args:
            recording: the iteration.
            before: the present or last schedule, which supplies the durations of operations without marks.
            limit: limit, bytes.

        Returns:
            None on failure: training continues without a schedule.
        """

        def make() -> OffloadSchedule:
            step = recorded_step(recording, recording.seconds(self._engine, before))
            return self._make(recording, step, limit)

        return self._attempt(make)

    def replan(self, plan: OffloadSchedule, limit: int) -> OffloadSchedule | None:
        """Make another schedule for the same iteration and another limit; None if that fails."""
        return self._attempt(lambda: self._make(plan.recording, plan.recorded, limit, plan.changes))

    def retime(self, plan: OffloadSchedule, seconds: list[float], limit: int) -> OffloadSchedule | None:
        """Replace each operation's duration by the shorter of the known and the newly measured one.

        The pool may wait for all copies when it takes or releases memory in an operation, so the shortest
        duration is the operation's own.

        Args:
            plan: the followed schedule; its predicted time is updated.
            seconds: duration of each operation in an iteration that followed the schedule.
            limit: limit, bytes.

        Returns:
            A better schedule if the durations differ much, else None.
        """
        before = plan.recorded.step
        step = before.with_seconds(np.minimum(before.seconds, seconds))
        plan.recorded = replace(plan.recorded, step=step)
        plan.swap = replace(plan.swap, replayed=replay(step, self._engine.link(), plan.swap.schedule))
        if before.duration - step.duration <= before.duration * OPTIONS.min_retimed_share:
            return None
        made = self._attempt(lambda: self._make(plan.recording, plan.recorded, limit, plan.changes))
        if made is None or made.swap.stall_seconds >= plan.swap.stall_seconds:
            return None
        needs, most = (max(limit, one.swap.limit_bytes, self.arena_bytes(one)) for one in (made, plan))
        return made if needs <= most else None

    def _make(
        self, recording: RecordedIteration, step: RecordedStep, limit: int, changes: int = 0
    ) -> OffloadSchedule:
        swap = self.fit_arena(self._new_planner(step.step), step.step, limit)
        copies = host_copies(step.step, swap.schedule, step.unread)
        self._engine.reserve(copies.size)
        return schedule_of(recording, step, swap, copies, changes)

    def _attempt(self, make: Callable[[], OffloadSchedule | None]) -> OffloadSchedule | None:
        """Return the result of `make`, or None on any error, so that training continues."""
        if self._failures >= OPTIONS.max_planning_failures:
            return None
        try:
            return make()
        except Exception as error:
            self._note_failure(error)
            return None

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            log.warning(
                "no plan of swaps could be made, tensors move as they are needed: %s",
                error or type(error).__name__,
                exc_info=not isinstance(error, PlanError),
            )

    def _new_planner(self, step: Step, tries: int | None = None) -> OffloadPlanner:
        return OffloadPlanner(step, self._engine.link(), host_limit=self._host_bytes, tries=tries)

    def arena_bytes(self, plan: OffloadSchedule) -> int:
        """Return the arena size for all buffers that a schedule leaves on the device, in bytes."""
        return self._arena_bytes(plan.recorded.step, plan.swap.schedule)

    def fit_arena(self, planner: OffloadPlanner, step: Step, limit: int) -> PlannedSchedule:
        """Find moves whose arena is within the limit, gaps between buffers included.

        A schedule with the same stall that packs better is preferred to one with additional moves.
        Fragmentation varies from schedule to schedule, so several are packed, for decreasing limits down to
        the smallest feasible limit.
        """

        def arena_of(planned: PlannedSchedule) -> int:
            return self._arena_bytes(step, planned.schedule)

        best = planner.nearest(limit)
        best = reduce_fragmentation(
            planner,
            best,
            lambda schedule: self._arena_bytes(step, schedule),
            variations=OPTIONS.packed_variations,
            enough=max(limit, best.limit_bytes),
        )
        if best.limit_bytes > limit:
            return best
        least = max(planner.lowest_limit(), limit - limit // OPTIONS.max_arena_reduction_divisor)
        target, tightest = limit, planner.tunables.margins[-1]
        for _ in range(OPTIONS.max_arena_rounds):
            if arena_of(best) <= limit or target < least:
                break
            found = planner.alternatives(target)[: OPTIONS.packed_alternatives]
            tight = [tightened(planner, one, tightest) or one for one in found]
            fits = [one for one in tight if arena_of(one) <= limit]
            best = fits[0] if fits else min([best, *tight], key=arena_of)
            excess = min(map(arena_of, tight), default=limit) - limit
            target -= max(excess // OPTIONS.arena_excess_divisor, limit // OPTIONS.arena_step_divisor)
        return best

    def _arena_bytes(self, step: Step, schedule: Schedule) -> int:
        """Return `arena_bytes` from a cache: packing takes tenths of a second of the program's time."""
        if (known := self._arenas.get(schedule)) is None:
            known = self._arenas[schedule] = arena_bytes(step, schedule, self._alignment)
        return known

    def cost(self, plan: OffloadSchedule, overhead: int) -> dict[str, Any]:
        """Return a schedule's cost and the smallest feasible limit for JSON, in bytes and seconds per step.

        Args:
            plan: the schedule.
            overhead: bytes that the pool holds in addition to the schedule's tensors.
        """
        step, swap = plan.recorded.step, plan.swap
        return {
            "step_seconds": step.duration,
            "added_seconds": swap.stall_seconds,
            "host_bytes": plan.copies.size,
            "moved_bytes": swap.replayed.moved_bytes + swap.replayed.returned_bytes,
            "smallest_limit_bytes": self._new_planner(step, tries=0).lowest_limit() + overhead,
        }

    def warn(self, plan: OffloadSchedule, limit: int, asked: int) -> None:
        """Warn once that the followed plan does not hold the limit, and why no plan does.

        Args:
            plan: the followed schedule.
            limit: part of the requested limit that remains for tensors, bytes.
            asked: the requested limit of all memory that the pool holds, bytes.
        """
        least = plan.swap.limit_bytes
        if least <= limit or self._warned:
            return
        self._warned = True
        log.warning(
            "no plan of moves holds the limit of %s: %s. The program goes on within the limit, as far as "
            "single operations allow: tensors move when an operation needs them, which takes longer. "
            "The smallest limit with a plan is %s",
            sized(asked),
            _reason(self._new_planner(plan.recorded.step), limit, least),
            typed_size(least + max(asked - limit, 0)),
        )

    def start_reloads_earlier(
        self, plan: OffloadSchedule, arrived: list[tuple[int, Any]], limit: int
    ) -> OffloadSchedule | None:
        """Make a schedule in which reloads that operations waited for start earlier.

        Return None if no such schedule is better, or on failure.

        Args:
            plan: the followed schedule.
            arrived: (row of the schedule, reload) of each reload.
            limit: limit of the arena, bytes; an arena above the limit must not grow.
        """
        return self._attempt(lambda: self._start_earlier(plan, arrived, limit))

    def _start_earlier(
        self, plan: OffloadSchedule, arrived: list[tuple[int, Any]], limit: int
    ) -> OffloadSchedule | None:
        step, swap = plan.recorded.step, plan.swap
        if plan.changes >= OPTIONS.max_wait_changes or not arrived:
            return None
        waited = np.zeros(len(swap.schedule))
        for row, transfer in arrived:
            waited[row] += self._engine.waited(transfer)
        waited *= _unplanned_shares(swap, waited, len(step))
        if waited.sum() <= step.duration * OPTIONS.min_wait_share:
            return None
        most = max(limit, self._arena_bytes(step, swap.schedule))
        for part in OPTIONS.wait_shares:
            schedule = advance_reloads(step, swap.schedule, part * waited, max(limit, swap.peak_bytes))
            if (schedule.fetch == swap.schedule.fetch).all():
                return None
            if self._arena_bytes(step, schedule) <= most:
                break
        else:
            return None
        try:
            judged = replay(step, self._engine.link(), schedule)
        except PlanError:  # another constraint is violated
            return None
        least = max(swap.limit_bytes, judged.peak_bytes)
        made = replace(swap, limit_bytes=least, schedule=schedule, replayed=judged)
        return schedule_of(plan.recording, plan.recorded, made, plan.copies, plan.changes + 1)


def _unplanned_shares(swap: PlannedSchedule, waited: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """Return the unplanned share of each reload's wait, float64[q]."""
    at = swap.schedule.use % k
    seen = np.bincount(at, waited, k)
    more = np.clip(seen - swap.replayed.wait, 0.0, None)
    result: NDArray[np.float64] = np.divide(more, seen, out=np.zeros(k), where=seen > 0)[at]
    return result


def _reason(planner: OffloadPlanner, limit: int, least: int) -> str:
    """Explain an infeasible limit: name the operation that needs most memory, or the host's memory."""
    floor, op = planner.floor()
    if floor <= limit:
        try:
            planner.check_limit(limit)
        except PlanError as error:
            return str(error)
        return f"no plan that we find holds less than {sized(least)}"
    step = planner.step
    names = [step.names[index] if index >= 0 else "" for index in step.operation.tolist()]
    known = [at for at, name in enumerate(names) if name.startswith("aten.") and step.working_set[at] > 0]
    at = min(known, key=lambda one: abs(one - op), default=op)  # the neighbor of a profiler's mark
    touched = int(step.working_set[at])
    label = names[at].removeprefix("aten.").partition(".")[0].strip("_") or "an operation"
    less = " (an optimizer with foreach=False needs less)" if label.startswith("foreach") else ""
    rest = sized(max(floor - touched, 0))
    return f"{label} needs {sized(touched)} at once{less}, and {rest} cannot leave meanwhile"


def arena_bytes(step: Step, schedule: Schedule, alignment: int) -> int:
    """Return the arena size, in bytes, of a packing of all buffers that a schedule leaves on the device.

    The size may exceed the peak load: if the load is always close to the limit, there are gaps between
    buffers.
    """
    buffers, _ = device_buffers(step, schedule, alignment=alignment)
    try:
        return solve(buffers, stop=Stop(nodes=OPTIONS.arena_packing_nodes)).arena_bytes
    except PlanError:  # sums of sizes exceed 64 bits
        return step.peak_bytes

"""Makes offload schedules from recorded iterations, and improves them by the waits of later iterations."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from mempool.logs import log
from mempool.torch.eager.recorded_iteration import Tape, recorded
from mempool.torch.eager.reserved_memory import arena_bytes
from mempool.torch.eager.schedule_actions import Program, program_of
from mempool.torch.offload.host_placement import host_copies
from mempool.units import sized
from solvers.errors import PlanError
from solvers.swap import OffloadPlanner, advance_reloads, reduce_fragmentation, replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.torch.eager.recorded_iteration import Recorded
    from mempool.torch.offload.engine import Engine
    from solvers.swap import PlannedSchedule, Schedule, Step

#: Waits below this share of an iteration's duration are ignored.
_WORTH = 1 / 1000
#: Failures after which no plan is tried any more.
_MOST_FAILURES = 3
#: Maximum number of changes of a program after waits.
_MOST_CHANGES = 16
#: Maximum number of replans for a lower limit, so that the buffers fit with gaps; and the divisor of the
#: limit that bounds the total reduction.
_MOST_ROUNDS, _MOST_PART = 5, 4
#: Number of alternative schedules with the same stall that are packed before the limit is reduced.
_VARIATIONS = 2
#: Shares of the waits by which reloads start earlier; the first share whose buffers can be packed is used.
_PARTS = (1.0, 0.5, 0.25)
#: Divisor of the host memory: plans leave that share to gaps between copies.
_GAPS = 16


class Planning:
    """Makes programs for a limit, and changes them."""

    def __init__(self, engine: Engine, host_bytes: int | None, alignment: int) -> None:
        """Prepare plans for an engine.

        Args:
            engine: copies between device and host.
            host_bytes: host memory for copies, bytes; None: no limit.
            alignment: alignment of offsets, bytes.
        """
        self._engine = engine
        self._alignment = alignment
        self._host_bytes = None if host_bytes is None else host_bytes - host_bytes // _GAPS
        self._warned = False
        self._failures = 0
        self._arenas: WeakKeyDictionary[Schedule, int] = WeakKeyDictionary()

    def made(self, tape: Tape, before: Program | None, limit: int) -> Program | None:
        """Make the program for an iteration and a limit, or the least feasible limit if that is higher.

        Args:
            tape: the iteration.
            before: the program followed now or last, which has the durations of operations without marks.
            limit: limit, bytes.

        Returns:
            None if no program can be made: training continues without a program.
        """

        def make() -> Program:
            step = recorded(tape, tape.seconds(self._engine, before))
            return self._program(tape, step, limit)

        return self._tried(make)

    def again(self, plan: Program, limit: int) -> Program | None:
        """Make another program for the same iteration and another limit; None if that fails."""
        return self._tried(lambda: self._program(plan.tape, plan.recorded, limit, plan.changes, tries=0))

    def _program(
        self, tape: Tape, step: Recorded, limit: int, changes: int = 0, *, tries: int | None = None
    ) -> Program:
        swap = self._fitting(self._planner(step.step, tries), step.step, limit)
        copies = host_copies(step.step, swap.schedule)
        self._engine.reserve(copies.size)
        return program_of(tape, step, swap, copies, changes)

    def _tried(self, make: Callable[[], Program | None]) -> Program | None:
        """Return the result of `make`, or None if that fails: no error of any kind ends the training."""
        if self._failures >= _MOST_FAILURES:
            return None
        try:
            return make()
        except Exception as error:
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            log.warning(
                "no plan of swaps could be made, tensors move as they are needed: %s",
                error or type(error).__name__,
                exc_info=not isinstance(error, PlanError),
            )

    def _planner(self, step: Step, tries: int | None = None) -> OffloadPlanner:
        return OffloadPlanner(step, self._engine.link(), host_limit=self._host_bytes, tries=tries)

    def arena(self, plan: Program) -> int:
        """Return the arena size for all buffers that a program leaves on the device, in bytes."""
        return self._arena(plan.recorded.step, plan.swap.schedule)

    def _fitting(self, planner: OffloadPlanner, step: Step, limit: int) -> PlannedSchedule:
        """Find moves whose arena is within the limit, gaps between buffers included.

        Schedules with an equal stall that pack better are preferred to additional moves. Whether a slightly
        lower limit packs better is a matter of chance, so several limits are tried, down to the least
        feasible one. Those tries do without the search for the least stall, which takes seconds.
        """

        def arena(schedule: Schedule) -> int:
            return self._arena(step, schedule)

        def packed_within(planner: OffloadPlanner, target: int) -> PlannedSchedule:
            swap = planner.nearest(target)
            enough = max(limit, swap.limit_bytes)
            return reduce_fragmentation(planner, swap, arena, variations=_VARIATIONS, enough=enough)

        best = tried = packed_within(planner, limit)
        if best.limit_bytes > limit:
            return best
        least = max(planner.lowest_limit(), limit - limit // _MOST_PART)
        quick, target = self._planner(step, tries=0), limit
        for left in range(_MOST_ROUNDS, 0, -1):
            if arena(best.schedule) <= limit or target <= least:
                break
            step_down = max(arena(tried.schedule) - limit, limit // 64)
            target = max(target - min(step_down, -(-(target - least) // left)), least)
            tried = packed_within(quick, target)
            best = min(best, tried, key=lambda swap: arena(swap.schedule))
        return best

    def _arena(self, step: Step, schedule: Schedule) -> int:
        """Return `arena_bytes`, cached: packing takes some tenths of a second of the program's time."""
        if (known := self._arenas.get(schedule)) is None:
            known = self._arenas[schedule] = arena_bytes(step, schedule, self._alignment)
        return known

    def warn(self, plan: Program, limit: int, asked: int) -> None:
        """Warn once that the followed plan does not hold the limit, and why no plan does.

        Args:
            plan: the followed program.
            limit: bytes left for tensors.
            asked: the requested limit, bytes, which also covers all else that the pool holds.
        """
        least = plan.swap.limit_bytes
        if least <= limit or self._warned:
            return
        self._warned = True
        why = f"no plan that we find holds less than {sized(least)}"
        try:
            self._planner(plan.recorded.step).check_limit(limit)
        except PlanError as error:
            why = str(error)
        log.warning(
            "a limit of %s%s is too low, the plan needs %s: %s",
            sized(asked),
            f", of which {sized(max(limit, 0))} are left to tensors," if limit < asked else "",
            sized(least),
            why,
        )

    def changed(self, plan: Program, arrived: list[tuple[int, Any]], limit: int) -> Program | None:
        """Make a program whose reloads start earlier if they were waited for.

        Return None if no such program is better, or on failure.

        Args:
            plan: the followed program.
            arrived: rows of the schedule, and their reloads.
            limit: limit of the arena, bytes; an arena that exceeds the limit already must not grow.
        """
        return self._tried(lambda: self._changed(plan, arrived, limit))

    def _changed(self, plan: Program, arrived: list[tuple[int, Any]], limit: int) -> Program | None:
        step, swap = plan.recorded.step, plan.swap
        if plan.changes >= _MOST_CHANGES or not arrived:
            return None
        waited = np.zeros(len(swap.schedule))
        for row, transfer in arrived:
            waited[row] += self._engine.waited(transfer)
        if waited.sum() <= step.duration * _WORTH:
            return None
        most = max(limit, self._arena(step, swap.schedule))
        for part in _PARTS:
            schedule = advance_reloads(step, swap.schedule, part * waited, max(limit, swap.peak_bytes))
            if (schedule.fetch == swap.schedule.fetch).all():
                return None
            if self._arena(step, schedule) <= most:
                break
        else:
            return None
        try:
            judged = replay(step, self._engine.link(), schedule)
        except PlanError:  # another constraint is violated
            return None
        least = max(swap.limit_bytes, judged.peak_bytes)
        made = replace(swap, limit_bytes=least, schedule=schedule, replayed=judged)
        return program_of(plan.tape, plan.recorded, made, plan.copies, plan.changes + 1)

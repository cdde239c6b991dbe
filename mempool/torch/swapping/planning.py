"""Programs of moves, made from an iteration as it happened and better with what the next ones waited for."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from mempool.logs import log
from mempool.report import sized
from mempool.torch.swapping.host_copies import host_copies
from mempool.torch.swapping.program import Program, program_of
from mempool.torch.swapping.reserved import arena_bytes
from mempool.torch.swapping.tape import Tape, recorded
from solvers.errors import PlanError
from solvers.swap import SwapPlanner, fetched_earlier, packed, replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.torch.swapping.engine import Engine
    from mempool.torch.swapping.tape import Recorded
    from solvers.swap import Schedule, Step, Swap

#: Waits below this part of an iteration are left alone.
_WORTH = 1 / 1000
#: How often a plan may fail to be made before nobody tries again.
_MOST_FAILURES = 3
#: How often a program is changed by what was waited for, at most.
_MOST_CHANGES = 16
#: How often moves are planned for less, so that they fit with their gaps, and by what part of the limit.
_MOST_ROUNDS, _MOST_PART = 5, 4
#: Other schedules of the same stall that are placed before.
_VARIATIONS = 2
#: Parts of what was waited for by which copies come sooner: the first whose buffers can be placed.
_PARTS = (1.0, 0.5, 0.25)
#: Part of the host's memory that plans leave to gaps between copies.
_GAPS = 16


class Planning:
    """Makes programs for a limit, and changes them."""

    def __init__(self, engine: Engine, host_bytes: int | None, alignment: int) -> None:
        """Plan for an engine, so many bytes of the host (None: any), and offsets that are so aligned."""
        self._engine = engine
        self._alignment = alignment
        self._host_bytes = None if host_bytes is None else host_bytes - host_bytes // _GAPS
        self._warned = False
        self._failures = 0
        self._arenas: WeakKeyDictionary[Schedule, int] = WeakKeyDictionary()

    def made(self, tape: Tape, before: Program | None, limit: int) -> Program | None:
        """The program for an iteration and a limit; where that cannot be held, for the least that can.

        Args:
            tape: the iteration.
            before: what was followed, or was last: it knows how long operations take that no mark tells.
            limit: bytes.

        Returns:
            None where it cannot be made: the program goes on without.
        """

        def make() -> Program:
            step = recorded(tape, tape.seconds(self._engine, before))
            return self._program(tape, step, limit)

        return self._tried(make)

    def again(self, plan: Program, limit: int) -> Program | None:
        """Another program for the iteration of this one and another limit; None where it cannot be made."""
        return self._tried(lambda: self._program(plan.tape, plan.recorded, limit, plan.changes, tries=0))

    def _program(
        self, tape: Tape, step: Recorded, limit: int, changes: int = 0, *, tries: int | None = None
    ) -> Program:
        swap = self._fitting(self._planner(step.step, tries), step.step, limit)
        copies = host_copies(step.step, swap.schedule)
        self._engine.reserve(copies.size)
        return program_of(tape, step, swap, copies, changes)

    def _tried(self, make: Callable[[], Program | None]) -> Program | None:
        """What is made; None where that fails: whatever it is, nobody's training ends by it."""
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

    def _planner(self, step: Step, tries: int | None = None) -> SwapPlanner:
        return SwapPlanner(step, self._engine.link(), host_limit=self._host_bytes, tries=tries)

    def arena(self, plan: Program) -> int:
        """Bytes of an arena for all that a program leaves on the device."""
        return self._arena(plan.recorded.step, plan.swap.schedule)

    def _fitting(self, planner: SwapPlanner, step: Step, limit: int) -> Swap:
        """Moves that leave so little that it is within the limit with the gaps between buffers.

        Rather others that wait no longer and are easier to place than more of them. A little less may be
        easier to place or not, by chance, so that several limits are tried, down to the least that can be
        held: without a search for the least stall, which takes seconds there.
        """

        def arena(schedule: Schedule) -> int:
            return self._arena(step, schedule)

        def packed_within(planner: SwapPlanner, target: int) -> Swap:
            swap = planner.nearest(target)
            enough = max(limit, swap.limit_bytes)
            return packed(planner, swap, arena, variations=_VARIATIONS, enough=enough)

        best = tried = packed_within(planner, limit)
        if best.limit_bytes > limit:
            return best
        least = max(planner.lowest(), limit - limit // _MOST_PART)
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
        """See `arena_bytes`; each is placed once, as that takes some tenths of a second of the program's."""
        if (known := self._arenas.get(schedule)) is None:
            known = self._arenas[schedule] = arena_bytes(step, schedule, self._alignment)
        return known

    def warn(self, plan: Program, limit: int, asked: int) -> None:
        """Say once that a plan, which the program follows, does not hold the limit, and why none does.

        Args:
            plan: what is followed.
            limit: bytes that tensors may take.
            asked: bytes of the limit that leaves them so much, beside what else the pool holds.
        """
        least = plan.swap.limit_bytes
        if least <= limit or self._warned:
            return
        self._warned = True
        why = f"no plan that we find holds less than {sized(least)}"
        try:
            self._planner(plan.recorded.step).check(limit)
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
        """A program whose copies back come sooner where they were waited for.

        None where it is as good, or where that fails.

        Args:
            plan: what was followed.
            arrived: rows of the schedule, and the copies that were waited for.
            limit: bytes that what lies where it is planned stays within; where it did not, it takes no more.
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
            schedule = fetched_earlier(step, swap.schedule, part * waited, max(limit, swap.peak_bytes))
            if (schedule.fetch == swap.schedule.fetch).all():
                return None
            if self._arena(step, schedule) <= most:
                break
        else:
            return None
        try:
            judged = replay(step, self._engine.link(), schedule)
        except PlanError:  # some other rule is in the way
            return None
        least = max(swap.limit_bytes, judged.peak_bytes)
        made = replace(swap, limit_bytes=least, schedule=schedule, replayed=judged)
        return program_of(plan.tape, plan.recorded, made, plan.copies, plan.changes + 1)

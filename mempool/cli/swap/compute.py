"""Computation of ``mempool swap``: offload schedules for the requested limits, and their figures."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mempool.cli.output import percent
from mempool.errors import UsageError
from mempool.units import binary, parse_memory
from solvers import PlanError, Stop, solve
from solvers.swap import OffloadPlanner, reduce_fragmentation
from solvers.swap.placement import device_buffers, place
from solvers.swap.schedule_file import move_rows, resting_rows, step_and_link_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from solvers.swap import Link, PlannedSchedule, Step
    from solvers.swap.schedule_file import StepSelection

#: Keys of a limit's row, None where the limit is infeasible.
_ROW = (
    "peak_bytes",
    "stall_seconds",
    "iteration_seconds",
    "swapped_bytes",
    "copied_out_bytes",
    "host_bytes",
    "moves",
    "by",
)
#: Number of intervals of the default limits, from the least peak without stall down to the floor.
_POINTS = 6
#: Node budgets: for the plans of both arenas (tenths of a second), and for each plan of a comparison.
_STOP, _COMPARED = Stop(nodes=10_000_000), Stop(nodes=200_000)


@dataclass(frozen=True)
class Limit:
    """A limit in bytes, or as the largest permitted slowdown of a step."""

    size: int | None = None
    slower: float = 0.0


def parse_limit(text: str) -> Limit:
    """Parse the text of ``--limit``.

    Raises:
        UsageError: the text is no limit.
    """
    hint = "say 12GiB, `free`, or so much slower a step may be: 5%"
    if text.strip().lower() == "free":
        return Limit()
    if percentage := re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*%\s*", text):
        return Limit(slower=float(percentage[1]) / 100)
    if re.fullmatch(r"\s*\d*\.\d+\s*", text):
        raise UsageError(f"{text!r} is no whole number of bytes: {hint}")
    try:
        return Limit(parse_memory(text))
    except UsageError as error:
        raise UsageError(f"{error}; {hint}") from None


class SwapSchedules:
    """The offload schedules of one step under the requested limits.

    Attributes:
        reason: reason why a requested limit is infeasible, or empty.
    """

    def __init__(
        self,
        step: Step,
        selection: StepSelection,
        link: Link,
        *,
        least_bytes: int | None,
        host_limit: int | None,
    ) -> None:
        self.step, self.selection, self.link = step, selection, link
        self.planner = OffloadPlanner(step, link, least_bytes=least_bytes, host_limit=host_limit)
        self.reason = ""

    def curve(self, report: Callable[[str], object]) -> list[PlannedSchedule | int]:
        """Return schedules for limits from the least peak without stall down to the floor.

        One of the limits is the peak load without moves.
        """
        free = self.planner.without_stall()
        floor = self.planner.floor()[0]
        gap = free.peak_bytes - floor
        limits = {self.step.peak_bytes, *(free.peak_bytes - gap * k // _POINTS for k in range(_POINTS + 1))}
        held = self._held([limit for limit in limits if limit >= floor], report)
        self.reason = ""  # default limits may be infeasible
        return [held[limit] for limit in sorted(held, reverse=True)]

    def for_limits(
        self, limits: Sequence[Limit], report: Callable[[str], object]
    ) -> list[PlannedSchedule | int]:
        """Return the schedule of each limit, or an infeasible limit itself."""
        held = self._held([limit.size for limit in limits if limit.size is not None], report)
        result: list[PlannedSchedule | int] = []
        for limit in limits:
            if limit.size is not None:
                result.append(held.get(limit.size, limit.size))
            elif limit.slower:
                report(f"planning for a step {percent(limit.slower)} slower")
                result.append(self.planner.within_slowdown(limit.slower))
            else:
                report("planning for a step without a stall")
                result.append(self.planner.without_stall())
        return result

    def _held(self, sizes: Sequence[int], report: Callable[[str], object]) -> dict[int, PlannedSchedule]:
        """Return the schedules of the feasible limits; set ``reason`` for an infeasible limit."""
        remaining = sorted(set(sizes))
        while remaining:
            try:
                self.planner.check_limit(remaining[0])
                schedules = self.planner.curve(
                    remaining, on_limit=lambda size: report(f"planning for {binary(size)}")
                )
            except PlanError as error:
                report(f"{binary(remaining[0])} is infeasible: searching the least feasible limit")
                least = self.planner.nearest(remaining[0]).limit_bytes
                self.reason = f"{error}; {least} bytes ({binary(least)}) is feasible"
                remaining = [size for size in remaining[1:] if size >= least]
            else:
                return dict(zip(remaining, schedules, strict=True))
        return {}

    def answer(self, swaps: list[PlannedSchedule | int], most_moves: int | None) -> dict[str, Any]:
        """Return the keys of ``mempool swap --json``."""
        floor, op = self.planner.floor()
        step, last = self.step, self._with_fewer_gaps(swaps[-1]) if swaps else 0
        swaps = [*swaps[:-1], last]
        return {
            "peak_load_bytes": step.peak_bytes,
            "iteration_seconds": step.duration,
            "operations": len(step),
            "buffers": len(step.size),
            "repeats": step.circular,
            "floor_bytes": floor,
            "floor_operation": step.name(op),
            "limits": [self._row(swap) for swap in swaps],
            "moves": [] if isinstance(last, int) else move_rows(step, last.schedule, most_moves),
            "resting": [] if isinstance(last, int) else resting_rows(step, last.schedule),
            **self._arenas(last),
            "reason": self.reason or None,
            **step_and_link_keys(self.selection, self.link),
        }

    def _with_fewer_gaps(self, swap: PlannedSchedule | int) -> PlannedSchedule | int:
        """Return a schedule of at most equal stall with fewer gaps."""
        if isinstance(swap, int) or swap.peak_bytes == self.step.peak_bytes:
            return swap
        return reduce_fragmentation(
            self.planner,
            swap,
            lambda schedule: solve(device_buffers(self.step, schedule)[0], stop=_COMPARED).arena_bytes,
        )

    def _arenas(self, swap: PlannedSchedule | int) -> dict[str, int | None]:
        """Return the arena sizes of device and host, from packings of the schedule's buffers."""
        if isinstance(swap, int):
            return dict.fromkeys(("arena_bytes", "host_arena_bytes"))
        device, host = place(self.step, swap.schedule, stop=_STOP)
        return {"arena_bytes": device.plan.arena_bytes, "host_arena_bytes": host.plan.arena_bytes}

    def _row(self, swap: PlannedSchedule | int) -> dict[str, Any]:
        if isinstance(swap, int):
            return {"limit_bytes": swap, **dict.fromkeys(_ROW)}
        replayed = swap.replayed
        values = (
            replayed.peak_bytes,
            replayed.stall_seconds,
            replayed.iteration_seconds,
            replayed.returned_bytes,
            replayed.moved_bytes,
            replayed.host_bytes,
            len(swap.schedule),
            swap.method,
        )
        return {"limit_bytes": swap.limit_bytes, **dict(zip(_ROW, values, strict=True))}

"""What swapping did."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mempool.torch.swapping.program import Program


@dataclass
class SwapCounts:
    """Counts since the beginning; bytes and seconds.

    Attributes:
        iterations: that have ended.
        plans: schedules that were made.
        margin_bytes: by how much less than the limit plans hold, since the pool reserves more than lives.
        changes: how often one was changed by what an iteration waited for.
        peak_bytes: most that was here at once, while operations were seen.
        out_bytes: copied to the host.
        in_bytes: copied back.
        iteration_out_bytes: in the last iteration.
        iteration_in_bytes: in the last iteration.
        on_demand: storages that an operation needed and no plan had brought.
        evicted: storages that left because room was needed at once.
        put_off: copies back for which there was no room when the plan asked for them.
        over: operations that began with more than the limit, since all else was needed.
        diverged: iterations that did not follow the plan.
        host_full: copies for which the host's arena had no room.
        beside: operations of other threads, which nothing planned.
        bypassed: operations that were not seen, since nothing had to move.
        waits: copies that operations waited for.
        waited_seconds: how long.
    """

    iterations: int = 0
    plans: int = 0
    changes: int = 0
    margin_bytes: int = 0
    peak_bytes: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    iteration_out_bytes: int = 0
    iteration_in_bytes: int = 0
    on_demand: int = 0
    evicted: int = 0
    put_off: int = 0
    over: int = 0
    diverged: int = 0
    host_full: int = 0
    beside: int = 0
    bypassed: int = 0
    waits: int = 0
    waited_seconds: float = 0.0
    _out_before: int = 0
    _in_before: int = 0

    def ended(self) -> None:
        """An iteration has ended."""
        self.iterations += 1
        self.iteration_out_bytes = self.out_bytes - self._out_before
        self.iteration_in_bytes = self.in_bytes - self._in_before
        self._out_before, self._in_before = self.out_bytes, self.in_bytes

    def waited(self, seconds: float) -> None:
        """A copy was waited for, if that took any time."""
        self.waits += seconds > 0
        self.waited_seconds += seconds


def said(counts: SwapCounts, plan: Program | None) -> dict[str, Any]:
    """The counts and the plan's numbers, for JSON; None for those of a plan that there is not."""
    values: dict[str, Any] = {k: v for k, v in asdict(counts).items() if not k.startswith("_")}
    values |= dict.fromkeys(("planned_peak_bytes", "unplanned_peak_bytes", "moves", "planned_stall_seconds"))
    if plan is not None:
        values["planned_peak_bytes"] = plan.swap.peak_bytes
        values["unplanned_peak_bytes"] = plan.recorded.step.peak_bytes
        values["moves"] = len(plan.swap.schedule)
        values["planned_stall_seconds"] = plan.swap.stall_seconds
    return values

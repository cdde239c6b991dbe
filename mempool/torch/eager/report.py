"""Counters and report entries of swapping."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mempool.torch.eager.schedule_actions import Program


@dataclass
class SwapCounts:
    """Counters since the start; bytes and seconds.

    Attributes:
        iterations: ended iterations.
        plans: schedules made.
        margin_bytes: difference of the limit and the plan's limit, since the pool reserves more than live
            bytes.
        changes: changes of schedules after waits.
        peak_bytes: peak of the resident bytes while operations were seen.
        out_bytes: bytes offloaded.
        in_bytes: bytes reloaded.
        iteration_out_bytes: bytes offloaded in the last iteration.
        iteration_in_bytes: bytes reloaded in the last iteration.
        on_demand: storages that an operation needed and no plan had reloaded.
        evicted: storages evicted because room was needed at once.
        put_off: planned reloads that lacked room at their planned time.
        over: operations that began above the limit, since all else was needed.
        diverged: iterations that did not follow the plan.
        host_full: copies that did not fit into the host's arena.
        beside: operations of other threads, which are not planned.
        bypassed: operations that were not seen, since nothing had to move.
        waits: transfers that operations waited for.
        waited_seconds: total time of these waits.
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
        """Record the end of an iteration."""
        self.iterations += 1
        self.iteration_out_bytes = self.out_bytes - self._out_before
        self.iteration_in_bytes = self.in_bytes - self._in_before
        self._out_before, self._in_before = self.out_bytes, self.in_bytes

    def waited(self, seconds: float) -> None:
        """Record a wait for a copy, unless the wait took no time."""
        self.waits += seconds > 0
        self.waited_seconds += seconds


def said(counts: SwapCounts, plan: Program | None) -> dict[str, Any]:
    """Return the counters and the plan's numbers, for JSON; without a plan, the latter are None."""
    values: dict[str, Any] = {k: v for k, v in asdict(counts).items() if not k.startswith("_")}
    values |= dict.fromkeys(("planned_peak_bytes", "unplanned_peak_bytes", "moves", "planned_stall_seconds"))
    if plan is not None:
        values["planned_peak_bytes"] = plan.swap.peak_bytes
        values["unplanned_peak_bytes"] = plan.recorded.step.peak_bytes
        values["moves"] = len(plan.swap.schedule)
        values["planned_stall_seconds"] = plan.swap.stall_seconds
    return values

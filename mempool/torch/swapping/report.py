"""What swapping did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class SwapCounts:
    """Counts since the beginning; bytes and seconds.

    Attributes:
        plans: schedules that were made.
        peak_bytes: most that was here at once.
        out_bytes: copied to the host.
        in_bytes: copied back.
        on_demand: storages that an operation needed and no plan had brought.
        evicted: storages that left because room was needed at once.
        over: operations that began with more than the budget, since all else was needed.
        diverged: iterations that did not follow the plan.
        host_full: copies for which the host's arena had no room.
        waited_seconds: what operations waited for copies.
    """

    plans: int = 0
    peak_bytes: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    on_demand: int = 0
    evicted: int = 0
    over: int = 0
    diverged: int = 0
    host_full: int = 0
    waited_seconds: float = 0.0

"""Tunables of offload planning: budgets and thresholds of the planner."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OffloadTunables:
    """Tunables of `OffloadPlanner`.

    *Work* counts operations and absences visited. All budgets count work and not seconds, so that schedules
    do not depend on the machine.

    Attributes:
        least_bytes: smaller buffers stay on the device, in bytes: a copy's fixed cost equals the transfer
            time of some hundred kilobytes.
        move_bytes: bytes that may be moved in addition to save a move, of schedules with the same stall: a
            move takes the host some 50 microseconds, which the program feels if its kernels are short. Copies
            that nobody waits for cost nothing.
        least_share: in a small step `least_bytes` would exclude every buffer, so the threshold is at most
            1 / `least_share` of the peak.
        ungrouped_operations: steps of at most so many operations stay ungrouped; others get about so many
            groups, and those that begin or end with an absence.
        limit_work: work of the orders tried for one limit; some tenths of a second.
        limit_tries: most orders tried for one limit.
        alternative_tries_divisor: orders tried for other schedules of the same limit, as a share of those for
            the best schedule.
        free_work: work of the search for the least peak without stall; larger than `limit_work`, because no
            local search follows. For steps whose operations are not grouped.
        free_tries: most orders of that search.
        improve_work: work of the final local search that improves the best schedule, shared by all restarts.
        restarts: restarts of the local search.
        least_changes: changes that one restart must afford per absence; with fewer, the local search is
            skipped.
        rounds: rounds in which the waits of a schedule are fed back into its search.
        schedule_work: most work of one schedule: in a large step, several absences are taken at once to
            stay below.
        full_rounds_work: most work of one schedule at which every order gets all rounds; above, each order
            gets one round and only the best gets all.
        margins: factors by which copy times are stretched to reduce fragmentation, the largest first: large
            margins are preferred if they do as well, for both directions may share a link and no step takes
            as long as the one before.
    """

    least_bytes: int = 64 << 10
    least_share: int = 4096
    move_bytes: int = 8 << 20
    ungrouped_operations: int = 2048
    limit_work: int = 150_000_000
    limit_tries: int = 300
    alternative_tries_divisor: int = 25
    free_work: int = 600_000_000
    free_tries: int = 1000
    improve_work: float = 100e6
    restarts: int = 4
    least_changes: float = 1 / 8
    rounds: int = 6
    schedule_work: int = 25_000_000
    full_rounds_work: int = 11_363_636
    margins: tuple[float, ...] = (4.0, 1.25, 1.0)


DEFAULTS = OffloadTunables()

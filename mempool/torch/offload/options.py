"""Tunables of offloading, for eager and compiled programs alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OffloadOptions:
    """Tunables of offloading. A divisor is of the limit unless another quantity is named.

    Attributes:
        host_page_piece_bytes: granularity for counting and releasing pages of host memory.
        host_release_bytes: smallest excess of host memory that is released, given the page faults of a later
            use.
        host_gap_divisor: divisor of the host memory; schedules reserve this share for gaps between copies.
        host_packing_nodes: node limit of the packing of host copies, for which a first plan suffices.
        pinned_step_bytes: least number of bytes that are page-locked at a time.
        pinned_idle_iterations: iterations without use before page-locked memory is released; locking takes
            tenths of a second per gibibyte.
        cuda_waits: most waits whose times are kept for the next mark, since a rewritten graph sets no marks.
        sync_copy_bytes: size up to which a CPU copy takes less time than waking a thread.
        link_rounds: rounds per copy size in a measurement of the link; the median counts.
        link_cpu_bytes: bytes per side and direction in a measurement of a CPU's link, in total more than a
            cache.

        min_storage_bytes: smallest storage that moves; C++ code wraps numbers in small tensors and keeps
            their addresses between operations.
        small_storage_divisor: size below which storages are evicted last, since copies have a fixed cost.
        copy_ahead_divisor: share of eviction candidates that are copied ahead in iterations without a
            schedule.

        max_iteration_operations: operations after which a recording without marks is dropped.
        max_iteration_footprints: operations per iteration whose footprints are remembered.
        max_patterns: most known patterns.
        stale_iterations: iterations without use after which a pattern may be replaced.
        unplanned_iterations: unplanned iterations that are remembered to detect a recurrence.
        pattern_history: number of past iterations for the prediction of the next pattern.
        first_period_search: operations before the first search for a period, doubled after each search.
        reported_divergences: iterations without a matching schedule before a report, if they are half of all
            iterations.
        max_unperiodic_operations: most operations that a recording keeps without a period.
        training_operations: operations before a period is accepted in a program that looks like training,
            whose optimizer steps may mark iterations.
        period_repetitions: repetitions needed to accept a period.
        period_divergences: consecutive diverging iterations that disprove a period.
        period_shared_storages: least share of an iteration's storages that the next iteration must use, too.

        dead_tail_divisor: least share of an iteration's operations between a storage's last access and its
            death for an offload in this time.
        min_wait_share: share of an iteration's duration below which waits are ignored.
        timed_iterations: scheduled iterations in which the durations of operations are measured again.
        min_retimed_share: least decrease of durations, as a share of an iteration, that leads to a new
            schedule.
        max_planning_failures: failures after which planning ends.
        max_wait_changes: changes of a schedule after waits.
        max_wait_changes_with_pool: changes of a schedule after waits, before the pool learns the moves.
        wait_shares: shares of the waits by which reloads start earlier; the first share with a valid packing
            is used.
        max_arena_rounds: replans for a lower limit, so that the buffers fit with gaps.
        packed_alternatives: schedules that are packed for each lower limit.
        arena_excess_divisor: share of the excess by which the next limit is lower, since a slightly different
            schedule often packs well,
        arena_step_divisor: and share of the limit by which it is lower at least.
        max_arena_reduction_divisor: bounds the total reduction of those replans.
        packed_variations: alternative schedules with the same stall that are packed before the limit is
            reduced.
        arena_packing_nodes: node limit of the packing of an iteration's arena: some tenths of a second.
        disturbed_iterations: successive iterations with evictions that lead to another schedule; the first
            iteration begins in the state of the eviction policy.
        max_lower_limits: replans because the pool holds more than the live bytes.
        lower_limit_divisor: smallest step of those replans.
        stable_iterations: iterations with an unchanged schedule before the pool may learn the pattern.

        admission_max_pause: most iterations between two attempts to install an arena.
        served_hits_per_miss: hits per miss above which the pool's plan counts as serving an iteration.
        admission_excess_divisor: largest excess with which an arena is installed; less than the reported
            excess.
        reported_excess_divisor: least excess of the pool that is reported.
        checked_operation_divisor: size of operations from which the pool's misses are checked.

        footprint_samples: runs of an operation with the same shapes whose workspace is measured.
        footprint_ample: factor of the argument bytes; the prediction of a footprint is skipped if there is so
            much free room, and the operation never made larger results. Predictions for arguments of several
            shapes (broadcasting) are never skipped.
        max_footprints: most cached footprints.

        bypass_open_divisor: free room of an iteration that permits the bypass.
        bypass_reserve_divisor: free room that each unseen operation must leave.
        bypass_iterations: successive iterations with free room before the bypass opens; doubled by each
            closing.
        bypass_max_iterations: upper bound of `bypass_iterations` after doublings.
        standby_iterations: successive unseen iterations that followed the pool's plan before the mode stands
            by; doubled by each departure from the plan.
        standby_reserve_divisor: free room below which a standby ends.
    """

    host_page_piece_bytes: int = 1 << 20
    host_release_bytes: int = 64 << 20
    host_gap_divisor: int = 16
    host_packing_nodes: int = 2000
    pinned_step_bytes: int = 64 << 20
    pinned_idle_iterations: int = 16
    cuda_waits: int = 4096
    sync_copy_bytes: int = 256 << 10
    link_rounds: int = 7
    link_cpu_bytes: int = 32 << 20

    min_storage_bytes: int = 1024
    small_storage_divisor: int = 4096
    copy_ahead_divisor: int = 16

    max_iteration_operations: int = 1 << 19
    max_iteration_footprints: int = 1 << 16
    max_patterns: int = 4
    stale_iterations: int = 64
    unplanned_iterations: int = 8
    pattern_history: int = 64
    first_period_search: int = 64
    reported_divergences: int = 16
    max_unperiodic_operations: int = 1 << 15
    training_operations: int = 1 << 12
    period_repetitions: int = 3
    period_divergences: int = 3
    period_shared_storages: float = 0.8

    dead_tail_divisor: int = 64
    min_wait_share: float = 1 / 1000
    timed_iterations: int = 2
    min_retimed_share: float = 1 / 100
    max_planning_failures: int = 3
    max_wait_changes: int = 16
    max_wait_changes_with_pool: int = 4
    wait_shares: tuple[float, ...] = (1.0, 0.5, 0.25)
    max_arena_rounds: int = 16
    packed_alternatives: int = 3
    arena_excess_divisor: int = 4
    arena_step_divisor: int = 256
    max_arena_reduction_divisor: int = 4
    packed_variations: int = 2
    arena_packing_nodes: int = 20_000_000
    disturbed_iterations: int = 2
    max_lower_limits: int = 4
    lower_limit_divisor: int = 128
    stable_iterations: int = 3

    admission_max_pause: int = 64
    served_hits_per_miss: int = 16
    admission_excess_divisor: int = 51
    reported_excess_divisor: int = 50
    checked_operation_divisor: int = 64

    footprint_samples: int = 2
    footprint_ample: int = 8
    max_footprints: int = 1 << 16

    bypass_open_divisor: int = 12
    bypass_reserve_divisor: int = 32
    bypass_iterations: int = 2
    bypass_max_iterations: int = 64
    standby_iterations: int = 4
    standby_reserve_divisor: int = 16


OPTIONS = OffloadOptions()

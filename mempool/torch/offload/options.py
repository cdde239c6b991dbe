"""Tunables of offloading, for eager and compiled programs alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OffloadOptions:
    """Tunables of offloading. A divisor applies to the limit unless the text names another quantity.

    Attributes:
        host_page_piece_bytes: granularity for counting and releasing pages of host memory.
        host_release_bytes: smallest excess of host memory that is released: less is not worth the page
            faults on the next use.
        host_gap_divisor: divisor of the host memory; schedules leave that share to gaps between copies.
        host_packing_nodes: node limit of the packing of host copies; the first plan is good already.
        pinned_step_bytes: least number of bytes that are page-locked at a time.
        pinned_idle_iterations: iterations without use after which page-locked memory is released: to lock it
            again takes some tenths of a second per gibibyte.
        cuda_waits: waits whose times are kept for the next mark; a rewritten graph sets no marks.
        sync_copy_bytes: CPU copies up to this size take less time than waking a thread.
        link_rounds: rounds per copy size when the link is measured; the median counts.
        link_cpu_bytes: bytes per side and direction while the link of a CPU is measured: together more than
            a cache.

        min_storage_bytes: smallest storage that moves: C++ wraps numbers in small tensors of its own, and
            keeps their addresses from one operation to the next.
        small_storage_divisor: smaller storages are evicted last, since copies have a fixed cost.
        copy_ahead_divisor: without a schedule, that share of the next eviction candidates is copied
            beforehand.

        max_iteration_operations: operations after which a recording is dropped if nothing marks the ends of
            iterations.
        max_iteration_footprints: operations per iteration whose footprints are remembered.
        max_patterns: patterns that are kept.
        stale_iterations: iterations without use after which a pattern may be replaced.
        unplanned_iterations: unplanned iterations that are remembered, to detect their recurrence.
        pattern_history: past iterations from whose order the next pattern is predicted.
        first_period_search: operations before the first search for a period, doubled after each search.
        reported_divergences: iterations without a fitting schedule before they are reported, if they are half
            of all iterations.
        max_unperiodic_operations: most operations that a recording keeps without a period.
        training_operations: below this number of operations, programs that look like training are left to
            the marks of optimizer steps.
        period_repetitions: repetitions needed to accept a period.
        period_divergences: consecutive diverging iterations that disprove a period.
        period_shared_storages: share of the storages used in one iteration that the next must use too.

        dead_tail_divisor: a storage that lives for more than that share of an iteration's operations after
            its last access may be offloaded until its death.
        min_wait_share: waits below this share of an iteration's duration are ignored.
        timed_iterations: iterations by a schedule in which the durations of operations are measured again.
        min_retimed_share: durations shorter by more than that share of an iteration lead to another schedule.
        max_planning_failures: failures after which no schedule is tried any more.
        max_wait_changes: changes of a schedule after waits.
        max_wait_changes_with_pool: changes of a schedule after waits, until the pool learns the moves.
        wait_shares: shares of the waits by which reloads start earlier; the first share whose buffers can be
            packed is used.
        max_arena_rounds: replans for a lower limit, so that the buffers fit with gaps.
        packed_alternatives: schedules that are packed for each of these limits.
        arena_excess_divisor: the next limit is lower by that share of the excess, as a schedule for a little
            less often packs by chance,
        arena_step_divisor: and at least by that share of the limit.
        max_arena_reduction_divisor: bounds the total reduction of those replans.
        packed_variations: alternative schedules with the same stall that are packed before the limit is
            reduced.
        arena_packing_nodes: node limit of the packing of an iteration's arena: some tenths of a second.
        disturbed_iterations: iterations in a row with evictions that lead to another schedule: the first one
            begins with memory as the eviction policy left it.
        max_lower_limits: replans because the pool holds more than the live bytes.
        lower_limit_divisor: smallest step of those replans.
        stable_iterations: iterations by an unchanged schedule after which the pool may learn the pattern.

        admission_max_pause: most iterations between two attempts to install an arena.
        served_hits_per_miss: hits per miss above which the pool's plan counts as serving an iteration.
        admission_excess_divisor: an excess up to that share is accepted rather than no arena; the share is
            less than the excess that is reported.
        reported_excess_divisor: an excess of the pool above that share is reported.
        checked_operation_divisor: for operations from that share on, the pool's misses are checked.

        footprint_samples: runs of an operation with the same shapes whose workspace is measured.
        footprint_ample: a footprint is not computed beforehand if the free room is this many times the bytes
            of the arguments, and the operation never made more than this many times its arguments. For an
            operation whose tensors have several shapes, as with broadcasting, it is always computed.
        max_footprints: footprints that are cached.

        bypass_open_divisor: room that an iteration must leave before later iterations may go unseen.
        bypass_reserve_divisor: room that each unseen operation must leave.
        bypass_iterations: such iterations in a row before the bypass opens; each closing doubles the number.
        bypass_max_iterations: most such iterations in a row.
        standby_iterations: unseen iterations in a row by the pool's plan before later ones go without any
            comparison of operations; each departure from the plan doubles the number.
        standby_reserve_divisor: room below which operations are compared again.
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

"""Tunables of the planner, with unit and reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlannerOptions:
    """Tunables of planning in the background.

    Attributes:
        allowance_seconds: processor seconds that looks and plans may use at once; enough for a program that
            repeats.
        gpu_allowance_seconds: `allowance_seconds` for GPU memory. Looks before the first step of a training
            use up a part, and a training lasts longer than a script. With 0.1 s, the first plan on an H100
            came after five seconds.
        time_share: share of the elapsed time that is added to the allowance.
        max_debt_seconds: largest debt that one long solve leaves.
        min_host_bytes: peak of live host memory from which the thread plans without a request of the
            program. Plans took 4 % of the processor time of a policy network's training that holds 0.3 MiB,
            and saved nothing.
        free_plans: number of plans without charge while the program follows its plans: one for each
            remembered variant, and as many joint plans.
        first_free_plans: `free_plans` while known plans serve only a part of the program: enough for a few
            variants. Without this bound, plans of iterations of random structure took 14 % of a program's
            processor time.
        paying_miss_rate: largest share of misses since the last plan at which known plans serve the program.
        handover_seconds: seconds that the program loses each time another thread waits for the interpreter's
            lock. Measured with a test suite of statsmodels on two cores of a virtual machine, where the
            planner's 8,000 waits took 0.6 s of the program's processor time.
        turn_seconds: seconds between two checks of the budget and of news to log.
        retry_seconds: seconds until the planner works again after a failure, with which a failing planner
            costs next to nothing.
        log_lines: most lines that ``explain`` logs at a time.
        log_seconds: least seconds between two logs by ``explain``.
        min_cache_bytes: least free memory kept outside an arena; an eighth of the arena if larger.
        patient_iterations: marked iterations to wait for the frees of buffers that outlive their iteration.
        min_new_events: least number of new events before another look at known iterations.
        rare_variant: share of iterations below which a variant that differs in only one size gets no plan.
        astray_rate: largest miss rate at which iterations follow the plans of an envelope's variants.
        max_enlarge_pause: longest pause, in iterations, before an outgrown upper-bound pattern is enlarged
            again.
        max_unmarked: number of allocations without a required mark after which marks are no longer awaited.
        unmarked_events: events between two looks for the first mark.
        max_slowdown: ratio of the iteration times with and without plans from which plans are unprofitable.
            Medians on a shared machine differ by less.
        max_warm_up: longest warm-up to learn, in allocations; repeated looks at a longer warm-up would cost
            too much.
        examined_allocations: latest allocations that looks examine beside known plans. Looks at all 2**15
            recorded ones raised the peak memory of a program of 240 variants, which holds 0.5 MB, by 13 MB.
        examined_iterations: least number of iterations to examine, of the longest known plan.
        look_share: share of the pool's memory that looks may take, which allows for more than
            `examined_allocations`.
        look_bytes: bytes that a look takes for each examined allocation.
        max_strays: plans are useless after this many allocations off the plans and a hit rate below
            `min_hit_rate`.
        min_hit_rate: see `max_strays`.
        min_allocations_to_judge: least number of allocations, in addition to two iterations, before a loaded
            plan counts as foreign.
        saved_share: least allocations of a saved plan, as a share of the allocations of the most used plan.
        pool_nodes: node budget of the pool's own solves; nodes are counted, not timed, so that all ranks of a
            job get the same plan.
        good: arena size relative to the lower bound up to which a plan is good.
        close_enough: arena size relative to the lower bound at which a solve stops early.
        close_patterns: least length of the common beginning and end of two close patterns, as a share of the
            longer pattern.
        smaller_factor: largest memory of a replacement, relative to the replaced plan.
        coverage_gain: least increase in coverage of the peak that also justifies a replacement.
        min_coverage: coverage of the peak below which a plan may be improved later.
        low_water_saving: least saving, as a share of the arena, for taking the arena in the middle of an
            iteration.
        pinned_iterations: least lifetime, in iterations, of a buffer that plans avoid although it blocks no
            plan yet.
        neighbor_collisions: requests with an occupied slot before plans are made around other clients' plans.
        joint_collisions: least number of collisions with live buffers since the last plan that trigger joint
            planning; fewer may come from a single kept tensor.
        joint_collision_share: least share of allocations that collide for joint planning.
        joint_arena_factor: largest size of a joint arena relative to the largest separate arena, or to the
            peak load.
        max_joint_pieces: largest joint packing problem, in pieces of lifetime; a larger one would take
            seconds.
        joint_search_pieces: largest joint problem, in pieces, that is also packed at once after a successful
            packing of one variant after the other.
    """

    allowance_seconds: float = 0.1
    gpu_allowance_seconds: float = 1.0
    time_share: float = 0.01
    max_debt_seconds: float = 0.05
    min_host_bytes: int = 1 << 20
    free_plans: int = 32
    first_free_plans: int = 8
    paying_miss_rate: float = 1 / 8
    handover_seconds: float = 80e-6
    turn_seconds: float = 0.25
    retry_seconds: float = 1.0
    log_lines: int = 8
    log_seconds: float = 5.0
    min_cache_bytes: int = 32 << 20
    patient_iterations: int = 5
    min_new_events: int = 16
    rare_variant: float = 1 / 8
    astray_rate: float = 1 / 64
    max_enlarge_pause: int = 32
    max_unmarked: int = 1 << 16
    unmarked_events: int = 256
    max_slowdown: float = 1.05
    max_warm_up: int = 1 << 13
    examined_allocations: int = 1 << 13
    examined_iterations: int = 8
    look_share: float = 1 / 16
    look_bytes: int = 256
    max_strays: int = 1 << 14
    min_hit_rate: float = 0.01
    min_allocations_to_judge: int = 64
    saved_share: float = 1 / 16
    pool_nodes: int = 20_000_000
    good: float = 1.01
    close_enough: float = 1.001
    close_patterns: float = 0.9
    smaller_factor: float = 1.1
    coverage_gain: float = 0.01
    min_coverage: float = 0.99
    low_water_saving: float = 1 / 64
    pinned_iterations: int = 2
    neighbor_collisions: int = 16
    joint_collisions: int = 16
    joint_collision_share: float = 1 / 512
    joint_arena_factor: float = 1.25
    max_joint_pieces: int = 1 << 18
    joint_search_pieces: int = 1 << 15


#: Tunables in use; tests replace single fields.
OPTIONS = PlannerOptions()

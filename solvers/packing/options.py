"""Tunables of the packing search in one table.

A *work unit* is roughly one placed buffer that first fit examines for another buffer; kernels report their
work, and node budgets count, in these units. "Measured" marks values set by a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchOptions:
    """Tunables of the packing search; counts are numbers of jobs unless another unit is given."""

    # -- slices and threads --

    #: Work units between two checks of the limits: at most tens of milliseconds.
    slice: int = 2_000_000
    #: Most jobs for which a kernel without limit checks is brief enough for the calling thread.
    calling_thread: int = 20_000
    #: Seconds between two checks of the limits while a kernel runs on the worker thread.
    worker_pause: float = 0.01
    #: Shortest time in seconds between two progress reports.
    report_pause: float = 0.1
    #: Work units of one turn of repair or of a complete search on a portfolio thread.
    portfolio_turn: int = 40_000_000
    #: Seconds per buffer and column to assemble the plan after the last check of the clock; measured.
    assembly_seconds: float = 5e-8

    # -- heuristics --

    #: Jobs above which jobs are sorted by start, so that neighbours in time are neighbours in memory, and
    #: above which first fit does not repack the best plan.
    sorted_by_start: int = 20_000
    #: Jobs above which first and best fit are skipped: a pass is quadratic and would take the whole budget.
    fit_limit: int = 10_000
    #: Jobs above which maximum load first takes seconds, and other orders are skipped.
    single_order: int = 400_000
    #: Work units per job charged for a skyline pass in a given order; measured.
    order_work: int = 50
    #: Work units per job charged for a maximum-load-first pass; measured.
    max_load_first_work: int = 500
    #: Gap, as a fraction of the target, up to which no pass starts that costs more than the remaining budget.
    near_gap: float = 1e-4

    # -- searches in turns --

    #: Work units of a turn in the first round; they double with each round.
    first_turn: int = 4_000_000
    #: Largest number of work units of a turn.
    longest_turn: int = 2**40
    #: Least work units per job with which the skyline search places all jobs once.
    skyline_search_work: int = 4_000
    #: Least work units per job with which local repair makes some repairs.
    local_repair_work: int = 200
    #: Largest number of jobs for which a complete search ends soon.
    few: int = 60
    #: Largest number of jobs for the pairwise search if the skyline search excludes them, as with gaps.
    pairwise: int = 300
    #: Jobs above which repair gains more in a turn than the complete search.
    many: int = 1_000
    #: Factor by which the turns of repair are longer with more than `many` jobs.
    long_repair: int = 4
    #: Factor by which the turns of the complete search are longer with more than `few` and up to `many` jobs.
    long_search: int = 4
    #: Jobs above which other threads do not repair.
    helped_repair: int = 20_000
    #: Largest product of fixed jobs and jobs for the skyline search, which lists fixed offsets per section.
    fixed_sections: int = 2**26

    # -- bounds and proofs --

    #: Number of times of highest load that the padded bound examines.
    padded_instants: int = 256
    #: Steps of the stack bound: tens of milliseconds.
    stack_steps: int = 4_000_000

    # -- columns of buffers that outlive an iteration --

    #: Largest number of rows of an unrolled problem.
    unrolled_rows: int = 100_000
    #: Largest number of columns.
    columns: int = 32
    #: Largest number of column counts tried.
    column_counts: int = 4
    #: Nodes for the first estimate of the arena with each number of columns: some milliseconds.
    estimate_nodes: int = 4_000_000
    #: Divisor of the node budget for one first estimate.
    estimate_share: int = 50

    # -- iteration variants --

    #: Largest fraction of coupling buffers for which the decomposition by variant helps.
    coupling_share: float = 0.25
    #: Largest number of rectangles that represent the coupling buffers alive in one variant; usually few.
    coupling_rectangles: int = 4096

    # -- streams --

    #: Largest number of streams for which pairs are tried; otherwise, only all streams together are tried.
    streams: int = 8
    #: Largest number of plans made for streams.
    stream_plans: int = 8


#: Options of every solve.
OPTIONS = SearchOptions()

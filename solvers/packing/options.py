"""Tunables of the packing search in one table.

A *work unit* is about one placed buffer that first fit examines for another buffer; the kernels report their
work in these units, and a node budget counts them. "Measured" marks values set by a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SearchOptions:
    """Tunables of the packing search; counts are numbers of jobs unless another unit is given."""

    # -- slices and threads --

    #: Work units between two checks of the limits: up to some ten milliseconds.
    slice: int = 2_000_000
    #: Jobs up to which a kernel that checks no limits ends soon enough to run on the calling thread.
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
    #: above which the best plan is not placed again by first fit.
    sorted_by_start: int = 20_000
    #: Jobs above which first and best fit are skipped: a pass is quadratic and would take the whole budget.
    fit_limit: int = 10_000
    #: Jobs above which maximum load first takes seconds and the other orders are skipped.
    single_order: int = 400_000
    #: Work units per job charged for a skyline pass in a given order; measured.
    order_work: int = 50
    #: Work units per job charged for a maximum-load-first pass; measured.
    max_load_first_work: int = 500
    #: Gap, as a fraction of the target, for which no step is begun that costs more than the remaining budget.
    near_gap: float = 1e-4

    # -- searches in turns --

    #: Work units of a turn in the first round; each round is twice as long as the round before.
    first_turn: int = 4_000_000
    #: Largest number of work units of a turn.
    longest_turn: int = 2**40
    #: Work units per job with which the skyline search places all jobs at least once.
    skyline_search_work: int = 4_000
    #: Work units per job with which local repair treats some places.
    local_repair_work: int = 200
    #: Largest number of jobs that a complete search soon exhausts.
    few: int = 60
    #: Largest number of jobs for the pairwise search where the skyline search takes none, as with gaps.
    pairwise: int = 300
    #: Jobs above which repair gains more in a turn than the complete search.
    many: int = 1_000
    #: Factor by which the turns of repair are longer with more than `many` jobs.
    long_repair: int = 4
    #: Factor by which the turns of the complete search are longer with more than `few` and up to `many` jobs.
    long_search: int = 4
    #: Jobs above which no other threads repair.
    helped_repair: int = 20_000
    #: Largest product of fixed jobs and jobs for the skyline search, which lists fixed offsets by section.
    fixed_sections: int = 2**26

    # -- bounds and proofs --

    #: Instants of highest load at which the padding of the topmost buffer is considered.
    padded_instants: int = 256
    #: Steps of the stack bound: some ten milliseconds.
    stack_steps: int = 4_000_000

    # -- columns of buffers that outlive an iteration --

    #: Largest number of rows of an unrolled problem that is still quick to pack.
    unrolled_rows: int = 100_000
    #: Largest number of columns.
    columns: int = 32
    #: Largest number of column counts tried.
    column_counts: int = 4
    #: Nodes for the first estimate of the arena with each column count: some milliseconds.
    estimate_nodes: int = 4_000_000
    #: Divisor of the node budget for one first estimate.
    estimate_share: int = 50

    # -- iteration variants --

    #: Largest fraction of coupling buffers for which the decomposition by variant helps.
    coupling_share: float = 0.25
    #: Largest number of rectangles that stand for the coupling buffers alive in one variant; usually few.
    coupling_rectangles: int = 4096

    # -- streams --

    #: Largest number of streams for which pairs are tried; with more, only all streams together.
    streams: int = 8
    #: Largest number of plans made for streams.
    stream_plans: int = 8


#: Options of every solve.
OPTIONS = SearchOptions()

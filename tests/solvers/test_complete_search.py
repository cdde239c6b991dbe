"""Complete searches: skyline search with any rules and pair search, compared with brute force."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import circular, crossing, fits

from solvers import Status, Stop, check, lower_bound, peak_load, solve
from solvers._core import PairwiseSearch, SkylineSearch
from solvers.packing.complete_search import can_search_skyline
from solvers.packing.jobs import Jobs, jobs_of
from solvers.packing.plan import Plan
from traces.buffers import Buffers

EVERY_RULE = 31
COMBINATIONS = range(EVERY_RULE + 1)
UNLIMITED = 2**40
PUBLIC = dict.fromkeys("ABCDEF", 1_048_576)


@st.composite
def one_piece(draw: st.DrawFn) -> Buffers:
    """Up to seven buffers without gaps on a line: free, aligned, some fixed, some equal."""
    n = draw(st.integers(0, 7))

    def column(element: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(element, min_size=n, max_size=n))

    start, length = column(st.integers(0, 6)), column(st.integers(1, 6))
    alignment = column(st.sampled_from(draw(st.sampled_from([[1], [4], [1, 2, 4]]))))
    fixed = [a * k if k < 3 else -1 for a, k in zip(alignment, column(st.integers(0, 20)), strict=True)]
    return Buffers.of(
        start,
        np.add(start, length),
        column(st.integers(1, 6)),
        alignment=alignment,
        offset=fixed if draw(st.integers(0, 2)) == 0 else -1,
    )


def search(buffers: Buffers, capacity: int, seed: int = 0, rules: int = EVERY_RULE) -> SkylineSearch:
    return SkylineSearch(jobs_of(buffers).native(), capacity, seed, rules)


def plan_of(buffers: Buffers, done: SkylineSearch, capacity: int) -> Plan:
    offset = np.array(done.offsets)[:, None]
    return Plan(offset, capacity, min(lower_bound(buffers), capacity), Status.FEASIBLE, "", 0, 0.0, "")


@settings(max_examples=25)
@given(one_piece(), st.integers(0, 4), st.integers(0, 3))
def test_search_with_any_rules_finds_a_plan_where_brute_force_does(
    buffers: Buffers, above: int, seed: int
) -> None:
    capacity = peak_load(buffers) + above
    expected = fits(buffers, capacity)
    for rules in COMBINATIONS:
        done = search(buffers, capacity, seed, rules)
        assert done.advance(UNLIMITED)
        assert (done.found, done.infeasible) == (expected, not expected), rules
        if done.found:
            plan = plan_of(buffers, done, capacity)
            check(dataclasses.replace(plan, lower_bound_bytes=0), buffers)


@settings(max_examples=30)
@given(one_piece(), st.integers(0, 3))
def test_proven_bound_makes_the_plan_optimal(buffers: Buffers, seed: int) -> None:
    plan = solve(buffers, seed=seed)
    if plan.offset is None:
        assert "fixed offset" in plan.reason
        return
    check(plan, buffers)
    assert plan.status is Status.OPTIMAL
    assert fits(buffers, plan.arena_bytes)
    assert plan.arena_bytes == 0 or not fits(buffers, plan.arena_bytes - 1)


def test_capacity_proven_too_small_is_infeasible() -> None:
    buffers = crossing()
    best = solve(buffers)
    check(best, buffers)
    assert (best.arena_bytes, peak_load(buffers)) == (9, 8)
    assert not fits(buffers, 8)
    assert (best.status, best.stopped_by) == (Status.OPTIMAL, "proof")
    below = solve(buffers, capacity=best.arena_bytes - 1)
    assert (below.status, below.stopped_by) == (Status.INFEASIBLE, "proof")
    assert solve(buffers, capacity=best.arena_bytes).arena_bytes == 9


def load_instance(bench: Path, name: str) -> Buffers:
    table = np.loadtxt(bench / f"{name}.1048576.csv", np.int64, delimiter=",", skiprows=1)
    return Buffers.of(table[:, 1], table[:, 2], table[:, 3])


@pytest.mark.parametrize("name", PUBLIC)
def test_public_instances_are_packed_within_their_capacity(bench: Path, name: str) -> None:
    """The limit is on nodes, since the machine may be busy.

    Fifty thousand nodes take some ten milliseconds.
    """
    buffers = load_instance(bench, name)
    nodes = []
    for seed in range(60):
        done = search(buffers, PUBLIC[name], seed)
        while not done.advance(200_000):
            assert done.nodes < 50_000, seed
        check(plan_of(buffers, done, PUBLIC[name]), buffers)
        nodes.append(done.nodes)
    assert np.median(nodes) <= 5_000


@pytest.mark.parametrize("name", ["A", "B", "C", "E", "F"])
def test_public_instances_reach_their_load_without_a_capacity(bench: Path, name: str) -> None:
    buffers = load_instance(bench, name)
    plan = solve(buffers)
    check(plan, buffers)
    assert plan.arena_bytes == peak_load(buffers)


def dissected(n: int, height: int = 4096, seed: int = 3) -> Buffers:
    """An arena without waste: each freed range is divided anew among the next buffers."""
    random = np.random.default_rng(seed)
    cuts = np.sort(random.choice(np.arange(1, height), 15, replace=False)).tolist()
    alive = [(0, low, high) for low, high in itertools.pairwise([0, *cuts, height])]
    rows: list[tuple[int, int, int]] = []
    for now in range(1, n):
        if len(rows) + len(alive) >= n:
            break
        k = int(random.integers(0, len(alive) - 1))
        gone = alive[k : k + 2]
        low, high = gone[0][1], gone[-1][2]
        rows += [(start, now, top - bottom) for start, bottom, top in gone]
        parts = np.unique(random.integers(low + 1, high, 2)).tolist() if high - low > 3 else []
        alive[k : k + 2] = [(now, bottom, top) for bottom, top in itertools.pairwise([low, *parts, high])]
    rows += [(start, n, top - bottom) for start, bottom, top in alive]
    start, end, size = np.array(rows).T
    return Buffers.of(start, end, size)


def test_sums_near_the_limit_of_64_bits_are_right_or_refused() -> None:
    huge = 2**60
    buffers = Buffers.of([0, 0, 2, 1], [2, 4, 4, 3], [huge, huge, huge, huge - 1])
    done = search(buffers, 3 * huge)
    assert done.advance(UNLIMITED)
    assert done.found
    check(plan_of(buffers, done, 3 * huge), buffers)
    assert search(buffers, 2**63 - 1).advance(UNLIMITED)
    below = search(buffers, 3 * huge - 2)
    assert below.advance(UNLIMITED)
    assert below.infeasible
    many = Buffers.of([0] * 3, [1] * 3, [2**60] * 3)
    jobs = dataclasses.replace(jobs_of(many), size=np.full(3, 2**61))
    with pytest.raises(ValueError, match="too many bytes"):
        SkylineSearch(jobs.native(), 2**62, 0)


def test_gaps_and_lifetimes_across_the_cut_of_a_circle_are_left_to_others() -> None:
    gapped = Buffers.of([0, 2], [6, 4], [5, 5], gaps=[(0, 2, 4)])
    assert not can_search_skyline(jobs_of(gapped))
    with pytest.raises(ValueError, match="several pieces"):
        search(gapped, 10)
    plan = solve(gapped)
    check(plan, gapped)
    assert plan.arena_bytes == 5


def test_many_buffers_are_begun_soon_and_an_interrupt_is_obeyed() -> None:
    random = np.random.default_rng(0)
    start = random.integers(0, 100_000, 60_000)
    buffers = Buffers.of(start, start + random.integers(1, 300, 60_000), random.integers(1, 10_000, 60_000))
    calls = itertools.count()
    plan = solve(buffers, stop=Stop(nodes=400_000_000, interrupt=lambda: next(calls) > 20))
    check(plan, buffers)
    assert plan.stopped_by == "interrupt"
    began = time.process_time()
    search(buffers, lower_bound(buffers)).advance(1_000_000)
    assert time.process_time() - began < 10  # a tenth of a second on an idle machine


@st.composite
def small_jobs(draw: st.DrawFn) -> Jobs:
    """Up to seven jobs of one to three pieces: free, aligned, some fixed, some equal."""
    n = draw(st.integers(0, 7))
    alignments = draw(st.sampled_from([[1], [4], [1, 2, 4]]))
    fix, most_pieces = draw(st.integers(0, 2)) == 0, draw(st.integers(1, 3))
    lives: list[list[tuple[int, int]]] = []
    rows: list[tuple[int, int, int]] = []
    for _ in range(n):
        times = sorted(draw(st.sets(st.integers(0, 9), min_size=2, max_size=2 * most_pieces)))
        pieces = list(zip(times[::2], times[1::2], strict=False))
        alignment = draw(st.sampled_from(alignments))
        fixed = alignment * draw(st.integers(0, 2)) if fix and draw(st.integers(0, 3)) == 0 else -1
        row = (draw(st.integers(1, 6)), alignment, fixed)
        twin = rows and draw(st.integers(0, 4)) == 0
        lives.append(lives[-1] if twin else pieces)
        rows.append(rows[-1] if twin else row)
    columns = np.array(rows, np.int64).reshape(-1, 3).T.copy()
    start, end = np.array([piece for life in lives for piece in life], np.int64).reshape(-1, 2).T.copy()
    counts = np.array([len(life) for life in lives], np.int64)
    return Jobs(np.arange(n), counts, start, end, columns[0], columns[1], columns[2], 0)


def meeting(jobs: Jobs) -> list[list[int]]:
    """Return for each job the other jobs that overlap in time."""
    lives = [
        list(zip(jobs.start[k : k + n].tolist(), jobs.end[k : k + n].tolist(), strict=True))
        for k, n in zip(jobs.first.tolist(), jobs.pieces.tolist(), strict=True)
    ]

    def meet(a: int, b: int) -> bool:
        return any(s < f and t < e for s, e in lives[a] for t, f in lives[b])

    return [[b for b in range(len(jobs)) if b != a and meet(a, b)] for a in range(len(jobs))]


def is_valid(jobs: Jobs, offsets: Sequence[int], capacity: int) -> bool:
    size, with_ = jobs.size.tolist(), meeting(jobs)
    return all(
        0 <= at <= capacity - size[a]
        and at % jobs.alignment[a] == 0
        and jobs.fixed[a] in (-1, at)
        and all(at + size[a] <= offsets[b] or offsets[b] + size[b] <= at for b in with_[a])
        for a, at in enumerate(offsets)
    )


def least_arena(jobs: Jobs, most: int) -> int:
    """Return the least arena by trying every offset of every job, fixed first; more than ``most`` if none."""
    order = sorted(range(len(jobs)), key=lambda j: -int(jobs.fixed[j]))
    size, with_, at = jobs.size.tolist(), meeting(jobs), dict[int, int]()
    best = most + 1

    def place(k: int, arena: int) -> None:
        nonlocal best
        if k == len(order):
            best = arena
            return
        j, fixed = order[k], int(jobs.fixed[order[k]])
        for low in range(0, best - size[j], int(jobs.alignment[j])) if fixed < 0 else [fixed]:
            if low + size[j] >= best:
                break
            if all(low >= at[i] + size[i] or low + size[j] <= at[i] for i in with_[j] if i in at):
                at[j] = low
                place(k + 1, max(arena, low + size[j]))
                del at[j]

    place(0, 0)
    return best


def pairs(jobs: Jobs, capacity: int, seed: int = 0) -> PairwiseSearch:
    return PairwiseSearch(jobs.native(), capacity, seed)


@settings(max_examples=100)
@given(small_jobs(), st.integers(-2, 4), st.integers(0, 3))
def test_pair_search_finds_a_plan_where_brute_force_does(jobs: Jobs, above: int, seed: int) -> None:
    least = least_arena(jobs, most=60)
    for capacity in {max(least + above, 0), max(least - 1, 0), least}:
        done = pairs(jobs, capacity, seed)
        assert done.advance(UNLIMITED)
        expected = least <= capacity and least <= 60  # otherwise fixed offsets contradict each other
        assert (done.found, done.infeasible) == (expected, not expected), capacity
        if done.found:
            assert is_valid(jobs, done.offsets.tolist(), capacity)


def test_unreachable_load_is_refuted_also_with_gaps() -> None:
    """Three arcs, any two of which meet, but never all three at one time."""
    ring = Buffers.of([0, 2, 4], [3, 5, 7], [5, 5, 5], period=6)
    plan, alternating = solve(ring, columns=1), solve(ring)
    check(plan, ring)
    check(alternating, ring)
    assert (plan.arena_bytes, plan.status) == (15, Status.OPTIMAL)
    assert (alternating.arena_bytes, alternating.columns) == (10, 2)  # the ring of two iterations is even
    smaller = pairs(jobs_of(ring), 14)
    assert smaller.advance(UNLIMITED)
    assert smaller.infeasible
    plain = crossing()
    assert pairs(jobs_of(plain), 9).advance(UNLIMITED)
    refuted = pairs(jobs_of(plain), 8)
    assert refuted.advance(UNLIMITED)
    assert refuted.infeasible


@pytest.mark.parametrize("capacity", [4096, 1_590_444, 1_590_445])
def test_equal_seeds_give_equal_plans_and_work_for_any_slices(capacity: int) -> None:
    jobs = jobs_of(circular(16, 455).unrolled(3))
    whole, sliced = (
        search(dissected(150), capacity, seed=1) if capacity == 4096 else pairs(jobs, capacity, seed=1)
        for _ in range(2)
    )
    assert whole.advance(UNLIMITED)
    while not sliced.advance(1000):
        pass
    assert whole.found == (capacity != 1_590_444)
    assert whole.offsets.tolist() == sliced.offsets.tolist()
    assert (whole.nodes, whole.work) == (sliced.nodes, sliced.work)
    assert whole.nodes > 100 or whole.found


def test_buffers_of_several_pieces_are_proven_optimal_within_few_nodes() -> None:
    proven = 0
    for seed in range(20):
        buffers = circular(24, seed)
        plan = solve(buffers, stop=Stop(nodes=20_000_000), solver="auto")
        check(plan, buffers)
        proven += plan.status is Status.OPTIMAL
    assert proven >= 19


def test_sums_of_pair_search_near_the_limit_of_64_bits_are_right_or_refused() -> None:
    huge = 2**58
    ring = Buffers.of([0, 2, 4, 0], [3, 5, 7, 1], [huge, huge, huge - 1, 1], alignment=[2, 2, 1, 1], period=6)
    jobs = jobs_of(ring)
    at, below = pairs(jobs, 3 * huge), pairs(jobs, 3 * huge - 2)
    assert at.advance(UNLIMITED)
    assert below.advance(UNLIMITED)
    assert at.found
    assert is_valid(jobs, at.offsets.tolist(), 3 * huge)
    assert below.infeasible
    assert pairs(jobs, 2**63 - 1).advance(UNLIMITED)
    with pytest.raises(ValueError, match="too many bytes"):
        pairs(jobs_of(Buffers.of([0] * 3, [1] * 3, [2**60] * 3)), 2**62)
    with pytest.raises(ValueError, match="too many jobs"):
        pairs(jobs_of(Buffers.of([0] * 1025, [1] * 1025, 1)), 2000)


def test_small_jobs_chasing_each_other_around_a_ring_end_soon() -> None:
    """Four arcs that meet in a ring, beside a buffer of 2^59 bytes: rising byte by byte would never end."""
    ring = Buffers.of([0, 2, 4, 6, 0], [3, 5, 7, 9, 8], [1, 1, 1, 1, 2**59], period=8)
    for capacity, seed in itertools.product((2**59 + 2, 2**59 + 1), range(5)):
        done = pairs(jobs_of(ring), capacity, seed)
        assert done.advance(1_000_000)
        assert done.found == (capacity == 2**59 + 2)

"""Pairwise search: correct with any rules, on circles, with gaps, alignment and fixed offsets."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import crossing
from problem_classes import circular

from solvers import Status, Stop, check, solve
from solvers._core import PairwiseSearch
from solvers.packing.jobs import Jobs, jobs_of
from traces.buffers import Buffers

if TYPE_CHECKING:
    from collections.abc import Sequence

EVERY_RULE = 63
COMBINATIONS = range(EVERY_RULE + 1)
UNLIMITED = 2**40


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


def holds(jobs: Jobs, offsets: Sequence[int], capacity: int) -> bool:
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


def pairs(jobs: Jobs, capacity: int, seed: int = 0, rules: int = EVERY_RULE) -> PairwiseSearch:
    return PairwiseSearch(jobs.native(), capacity, seed, rules)


@settings(deadline=None, max_examples=40)
@given(small_jobs(), st.integers(-2, 4), st.integers(0, 3))
def test_pair_search_with_any_rules_finds_a_plan_where_brute_force_does(
    jobs: Jobs, above: int, seed: int
) -> None:
    least = least_arena(jobs, most=60)
    for capacity in {max(least + above, 0), max(least - 1, 0), least}:
        for rules in COMBINATIONS:
            done = pairs(jobs, capacity, seed, rules)
            assert done.advance(UNLIMITED)
            expected = least <= capacity and least <= 60  # more: fixed offsets contradict each other
            assert (done.found, done.infeasible) == (expected, not expected), (capacity, rules)
            if done.found:
                assert holds(jobs, done.offsets.tolist(), capacity), rules


@pytest.mark.parametrize("seed", range(6))
def test_pair_search_agrees_with_the_exact_model_on_circles(seed: int) -> None:
    pytest.importorskip("ortools")
    buffers = circular(6, seed)
    plan = solve(buffers, solver="exact", columns=buffers.max_instances, stop=Stop(nodes=2**34))
    assert plan.status is Status.OPTIMAL
    jobs = jobs_of(buffers.unrolled(buffers.max_instances))
    at, below = pairs(jobs, plan.arena_bytes), pairs(jobs, plan.arena_bytes - 1)
    assert at.advance(UNLIMITED)
    assert below.advance(UNLIMITED)
    assert at.found
    assert below.infeasible


def test_unreachable_load_is_refuted_also_with_gaps() -> None:
    """Three arcs, any two of which meet, but never all three at one time."""
    ring = Buffers.of([0, 2, 4], [3, 5, 7], [5, 5, 5], period=6)
    plan = solve(ring)
    check(plan, ring)
    assert (plan.arena_bytes, plan.status) == (15, Status.OPTIMAL)
    assert pairs(jobs_of(ring), 14).infeasible
    plain = crossing()
    assert pairs(jobs_of(plain), 9).advance(UNLIMITED)
    refuted = pairs(jobs_of(plain), 8)
    assert refuted.advance(UNLIMITED)
    assert refuted.infeasible


@pytest.mark.parametrize("capacity", [1_590_444, 1_590_445])
def test_equal_seeds_give_equal_plans_and_work_for_any_slices(capacity: int) -> None:
    jobs = jobs_of(circular(16, 455).unrolled(3))
    whole, sliced = pairs(jobs, capacity, seed=1), pairs(jobs, capacity, seed=1)
    assert whole.advance(UNLIMITED)
    while not sliced.advance(1000):
        pass
    assert whole.found == (capacity == 1_590_445)
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


def test_sums_near_the_limit_of_64_bits_are_right_or_refused() -> None:
    huge = 2**58
    ring = Buffers.of([0, 2, 4, 0], [3, 5, 7, 1], [huge, huge, huge - 1, 1], alignment=[2, 2, 1, 1], period=6)
    jobs = jobs_of(ring)
    at, below = pairs(jobs, 3 * huge), pairs(jobs, 3 * huge - 2)
    assert at.advance(UNLIMITED)
    assert below.advance(UNLIMITED)
    assert at.found
    assert holds(jobs, at.offsets.tolist(), 3 * huge)
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
        done = pairs(jobs_of(ring), capacity, seed, 0)
        assert done.advance(1_000_000)
        assert done.found == (capacity == 2**59 + 2)

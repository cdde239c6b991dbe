"""Peak-outward packing.

Buffers alive at the peak come first, then their neighbours on either side, then the rest.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from outward_plans import checked, of_buffers, offsets_within

from solvers import Status, Stop, _core, check, solve
from solvers.packing import greedy
from solvers.packing.jobs import jobs_of
from solvers.packing.peak_outward import Sides
from traces.buffers import Buffers
from traces.instances import flat, scattered

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.packing.jobs import Jobs


@st.composite
def stackable(draw: st.DrawFn) -> Buffers:
    """A few buffers whose sizes are multiples of their alignment."""
    times = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=40))
    sizes = draw(st.lists(st.integers(1, 9), min_size=len(times), max_size=len(times)))
    alignment = draw(st.sampled_from([1, 2, 8]))
    start, length = np.array(times).T
    return Buffers.of(start, start + length, alignment * np.array(sizes), alignment=alignment)


@given(st.data())
@settings(max_examples=300)
def test_peak_outward_offsets_are_a_valid_plan_within_the_goal_at_the_peak(data: st.DataObject) -> None:
    buffers = data.draw(stackable())
    bound = jobs_of(buffers).lower_bound
    goal = bound + data.draw(st.integers(0, 20))
    offsets = offsets_within(buffers, goal, data.draw(st.integers(0, 3)))
    assume(offsets is not None)
    assert offsets is not None
    checked(buffers, offsets, 2**62)
    tops, times = offsets + buffers.size, np.arange(60)[:, None]
    alive = (buffers.start <= times) & (times < buffers.end)
    peak = int((alive * buffers.size).sum(axis=1).argmax())
    assert tops[alive[peak]].max() <= goal


def test_buffers_far_from_the_peak_never_restart_the_packing() -> None:
    """Some lie above the goal at first, and no longer after window repair."""
    above = 0
    for seed in range(10):
        buffers = flat(5_000, seed, mean_live=100)
        jobs = jobs_of(buffers)
        native, bound = jobs.native(), jobs.lower_bound
        work = _core.PeakOutward(native, bound, 0)
        assert work.advance(10**9)
        checked(buffers, of_buffers(jobs, work.offsets), work.arena)
        above += work.arena > bound
        together = Sides(native, 0)
        while together.arena != bound and together.work < 10**9:
            together.advance(10**6, bound, 2 * bound)
        assert together.offsets is not None
        checked(buffers, of_buffers(jobs, together.offsets), bound)
        assert not together.rounds
    assert above


@given(st.data())
@settings(max_examples=300)
def test_peak_first_and_either_side_in_order_make_a_plan(data: st.DataObject) -> None:
    buffers = data.draw(stackable())
    jobs = jobs_of(buffers)
    offsets = of_buffers(jobs, _core.pack_peak_first(jobs.native(), _core.Cancel()))
    checked(buffers, offsets, int(buffers.size.sum()))


def test_peak_first_wastes_little_where_the_load_falls_from_a_single_peak() -> None:
    """The waste is at most a fourth of the waste of earliest start first, on average."""
    waste = much = 0
    for seed in range(8):
        jobs = jobs_of(scattered(20_000, seed))
        native = jobs.native()
        waste += arena_over(jobs, _core.pack_peak_first(native, _core.Cancel()))
        much += arena_over(jobs, _core.pack_in_order(native, native.start_order, _core.Cancel()))
    assert 4 * waste < much


def arena_over(jobs: Jobs, offsets: NDArray[np.int64]) -> int:
    """Bytes above the load."""
    return int((offsets + jobs.size).max()) - jobs.lower_bound


def test_cancelled_peak_first_packing_returns_no_offsets() -> None:
    cancel = _core.Cancel()
    cancel.cancel()
    assert len(_core.pack_peak_first(jobs_of(scattered(100, 0)).native(), cancel)) == 0


@pytest.mark.parametrize("n", [1_000, 10_000])
def test_most_scattered_lifetimes_reach_the_load_in_a_single_pass(n: int) -> None:
    seeds, found = range(10_000 // n + 9), 0
    for seed in seeds:
        buffers = scattered(n, seed)
        bound = jobs_of(buffers).lower_bound
        offsets = offsets_within(buffers, bound, 0)
        if offsets is None:
            continue
        found += 1
        checked(buffers, offsets, bound)
        plan = solve(buffers, stop=Stop(nodes=4_000 * n))
        assert plan.status is Status.OPTIMAL
        check(plan, buffers)
    assert found > len(seeds) / 2


@pytest.mark.parametrize(
    ("seed", "small"),
    [
        (368, [(5, 10, 6), (3, 9, 5), (3, 7, 2), (1, 5, 6), (2, 12, 5), (8, 9, 6)]),
        (271, [(3, 12, 6), (11, 14, 6), (0, 3, 6), (0, 6, 4), (1, 6, 5), (9, 13, 3), (12, 14, 2)]),
        (0, [(5, 9, 1), (1, 7, 5), (2, 3, 1), (1, 11, 3), (2, 11, 3), (0, 8, 4)]),
        (6, [(1, 10, 4), (4, 10, 2), (1, 4, 2), (0, 11, 3), (1, 3, 4), (0, 4, 2)]),
    ],
    ids=["a slit", "another slit", "hangs", "hangs too"],
)
def test_backtracking_reaches_the_load_without_rising_over_hanging_buffers(
    seed: int, small: list[tuple[int, int, int]]
) -> None:
    """Few buffers for which the load can be reached, and only by backtracking."""
    start, end, size = np.array(small).T
    buffers = Buffers.of(start, end, size)
    jobs = jobs_of(buffers)
    work = _core.PeakOutward(jobs.native(), jobs.lower_bound, seed)
    assert work.advance(200_000)
    checked(buffers, work.offsets, jobs.lower_bound)


def test_stack_leaning_to_the_harder_side_succeeds_where_an_even_stack_fails() -> None:
    """With the first try alone these are 11."""
    found = 0
    for seed in range(20):
        buffers = flat(1_000, seed, mean_live=100)
        jobs = jobs_of(buffers)
        work = _core.PeakOutward(jobs.native(), jobs.lower_bound, 0)
        while not work.given_up:
            if work.advance(10**6):
                found += 1
                checked(buffers, of_buffers(jobs, work.offsets), jobs.lower_bound)
                break
    assert found > 14


def test_packing_below_the_load_is_given_up_at_once() -> None:
    jobs = jobs_of(scattered(100, 0))
    work = _core.PeakOutward(jobs.native(), jobs.lower_bound - 1, 0)
    assert work.given_up
    looks = work.work
    assert not work.advance(10**6)
    assert work.work == looks


def test_before_all_is_placed_nothing_has_an_offset() -> None:
    jobs = jobs_of(scattered(100, 0))
    work = _core.PeakOutward(jobs.native(), jobs.lower_bound, 0)
    assert work.offsets.tolist() == [-1] * len(jobs)
    assert work.arena == jobs.size.max() - 1


def test_packing_is_given_up_after_many_failures() -> None:
    jobs = jobs_of(flat(5_000, 0, mean_live=1_500))
    work = _core.PeakOutward(jobs.native(), jobs.lower_bound, 0)
    assert not work.given_up
    assert not work.advance(10**12)
    assert work.given_up


def test_offsets_completed_by_the_last_unit_of_a_budget_are_found() -> None:
    jobs = jobs_of(scattered(1_000, 0))
    whole, work = (_core.PeakOutward(jobs.native(), jobs.lower_bound, 0) for _ in range(2))
    assert whole.advance(10**9)
    assert work.advance(whole.work - work.work)
    assert work.work == whole.work
    assert (work.offsets == whole.offsets).all()


def test_work_units_of_the_beginning_are_counted() -> None:
    jobs = jobs_of(scattered(1_000, 0))
    work = _core.PeakOutward(jobs.native(), jobs.lower_bound, 0)
    stacked = work.work
    assert stacked >= len(jobs)
    assert not work.advance(1)
    assert work.work >= stacked + 10 * len(jobs)


def test_goal_between_two_alignments_keeps_both_sides_aligned() -> None:
    buffers = scattered(1_000, 4)
    aligned = Buffers.of(buffers.start, buffers.end, -(-buffers.size // 64) * 64, alignment=64)
    goal = jobs_of(aligned).lower_bound + 63
    offsets = offsets_within(aligned, goal, 0)
    assert offsets is not None
    assert not (offsets % 64).any()
    checked(aligned, offsets, goal)


def test_same_seed_gives_the_same_offsets() -> None:
    buffers = scattered(1_000, 4)
    bound = jobs_of(buffers).lower_bound
    first, second = (offsets_within(buffers, bound, 7) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.tolist() == second.tolist()


def test_budget_in_parts_gives_the_same_offsets() -> None:
    jobs = jobs_of(scattered(1_000, 4))
    whole, parts = (_core.PeakOutward(jobs.native(), jobs.lower_bound, 0) for _ in range(2))
    assert whole.advance(3_000 * len(jobs))
    for _ in range(3_000):
        if parts.advance(2_000):
            break
    assert parts.offsets.tolist() == whole.offsets.tolist()


@pytest.mark.parametrize(
    "buffers",
    [
        Buffers.of([0, 1], [2, 3], 8, offset=[0, -1]),
        Buffers.of([0, 1], [2, 3], [8, 4], alignment=8),
        Buffers.of([0, 2, 4], [3, 5, 7], 8, period=6),
    ],
    ids=["pinned", "padded", "round the circle"],
)
def test_unsupported_buffers_are_refused_and_left_to_other_kernels(buffers: Buffers) -> None:
    jobs = jobs_of(buffers)
    assert not greedy.can_halve(jobs)
    with pytest.raises(ValueError, match=r"gaps|fixed offsets, or sizes that are not aligned"):
        _core.PeakOutward(jobs.native(), 1 << 20, 0)
    with pytest.raises(ValueError, match=r"gaps|fixed offsets, or sizes that are not aligned"):
        _core.pack_peak_first(jobs.native(), _core.Cancel())
    plan = solve(buffers)
    check(plan, buffers)
    assert plan.offset is not None


def test_packing_without_jobs_is_refused() -> None:
    with pytest.raises(ValueError, match="there are none"):
        _core.PeakOutward(jobs_of(Buffers.of([], [], [])).native(), 1, 0)


def test_kernel_keeps_its_jobs_alive() -> None:
    native = jobs_of(scattered(100, 0)).native()
    before = sys.getrefcount(native)
    work = _core.PeakOutward(native, 1, 0)
    assert sys.getrefcount(native) == before + 1
    del work
    assert sys.getrefcount(native) == before

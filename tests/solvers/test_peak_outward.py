"""Peak-outward packing: jobs alive at the peak first, then their neighbours in time, then the others."""

from __future__ import annotations

import dataclasses
import sys
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problem_classes import flat, scattered

from solvers import Status, Stop, _core, check, solve
from solvers.packing import task as task_module
from solvers.packing.greedy import can_pack_peak_outward
from solvers.packing.jobs import jobs_of
from solvers.packing.options import OPTIONS
from solvers.packing.peak_outward import PeakOutward
from traces.buffers import Buffers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.packing.jobs import Jobs

#: Small instances whose load is reached only by backtracking: (start, end, size) of each buffer, with a seed.
TIGHT = [
    (368, [(5, 10, 6), (3, 9, 5), (3, 7, 2), (1, 5, 6), (2, 12, 5), (8, 9, 6)]),
    (271, [(3, 12, 6), (11, 14, 6), (0, 3, 6), (0, 6, 4), (1, 6, 5), (9, 13, 3), (12, 14, 2)]),
    (0, [(5, 9, 1), (1, 7, 5), (2, 3, 1), (1, 11, 3), (2, 11, 3), (0, 8, 4)]),
    (6, [(1, 10, 4), (4, 10, 2), (1, 4, 2), (0, 11, 3), (1, 3, 4), (0, 4, 2)]),
]


def of_buffers(jobs: Jobs, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the offsets in the order of the buffers, all of which take memory."""
    result = np.empty(len(jobs), np.int64)
    result[jobs.row] = offsets
    return result


def packed_within(buffers: Buffers, goal: int, seed: int = 0) -> NDArray[np.int64] | None:
    """Return the offsets of the buffers, or None if the search finds none soon."""
    jobs = jobs_of(buffers)
    search = _core.PeakOutward(jobs.native(), goal, seed)
    if not search.advance(OPTIONS.peak_outward_work * len(jobs)):
        return None
    assert search.arena == (search.offsets + jobs.size).max()
    return of_buffers(jobs, search.offsets)


def check_offsets(buffers: Buffers, offsets: NDArray[np.int64], goal: int) -> None:
    """Check that the offsets are a valid plan whose arena is at most `goal` bytes."""
    arena = int((offsets + buffers.size).max())
    assert arena <= goal
    plan = solve(buffers, solver="first_fit")
    check(
        dataclasses.replace(plan, offset=offsets[:, None], arena_bytes=arena, status=Status.FEASIBLE), buffers
    )


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
    goal = jobs_of(buffers).lower_bound + data.draw(st.integers(0, 20))
    offsets = packed_within(buffers, goal, data.draw(st.integers(0, 3)))
    assume(offsets is not None)
    assert offsets is not None
    check_offsets(buffers, offsets, 2**62)
    tops, times = offsets + buffers.size, np.arange(60)[:, None]
    alive = (buffers.start <= times) & (times < buffers.end)
    peak = int((alive * buffers.size).sum(axis=1).argmax())
    assert tops[alive[peak]].max() <= goal


@given(stackable())
@settings(max_examples=300)
def test_peak_first_offsets_are_a_valid_plan(buffers: Buffers) -> None:
    jobs = jobs_of(buffers)
    offsets = of_buffers(jobs, _core.pack_peak_first(jobs.native(), _core.Cancel()))
    check_offsets(buffers, offsets, int(buffers.size.sum()))


def test_cancelled_peak_first_packing_returns_no_offsets() -> None:
    cancel = _core.Cancel()
    cancel.cancel()
    assert len(_core.pack_peak_first(jobs_of(scattered(100, 0)).native(), cancel)) == 0


@pytest.mark.parametrize("n", [1_000, 10_000])
def test_most_scattered_lifetimes_reach_the_load(n: int) -> None:
    seeds, reached = range(10_000 // n + 9), 0
    for seed in seeds:
        buffers = scattered(n, seed)
        bound = jobs_of(buffers).lower_bound
        offsets = packed_within(buffers, bound)
        if offsets is None:
            continue
        reached += 1
        check_offsets(buffers, offsets, bound)
        plan = solve(buffers, stop=Stop(nodes=4_000 * n))
        assert plan.status is Status.OPTIMAL
        check(plan, buffers)
    assert reached > len(seeds) / 2


@pytest.mark.parametrize(("seed", "rows"), TIGHT, ids=["slit", "second slit", "edge job", "second edge job"])
def test_backtracking_reaches_the_load_of_small_tight_instances(
    seed: int, rows: list[tuple[int, int, int]]
) -> None:
    buffers = Buffers.of(*np.array(rows).T)
    jobs = jobs_of(buffers)
    search = _core.PeakOutward(jobs.native(), jobs.lower_bound, seed)
    assert search.advance(200_000)
    check_offsets(buffers, search.offsets, jobs.lower_bound)


def test_goal_below_the_load_is_given_up_without_work() -> None:
    jobs = jobs_of(scattered(100, 0))
    search = _core.PeakOutward(jobs.native(), jobs.lower_bound - 1, 0)
    assert search.given_up
    work = search.work
    assert not search.advance(10**6)
    assert search.work == work


def test_goal_is_given_up_after_many_failures() -> None:
    jobs = jobs_of(flat(5_000, 0, mean_live=1_500))
    search = _core.PeakOutward(jobs.native(), jobs.lower_bound, 0)
    assert not search.given_up
    assert not search.advance(10**12)
    assert search.given_up


def test_goal_between_two_alignments_keeps_both_sides_aligned() -> None:
    buffers = scattered(1_000, 4)
    aligned = Buffers.of(buffers.start, buffers.end, -(-buffers.size // 64) * 64, alignment=64)
    goal = jobs_of(aligned).lower_bound + 63
    offsets = packed_within(aligned, goal)
    assert offsets is not None
    assert not (offsets % 64).any()
    check_offsets(aligned, offsets, goal)


def test_slices_of_the_budget_do_not_change_the_offsets() -> None:
    jobs = jobs_of(scattered(1_000, 4))
    whole, again, parts = (_core.PeakOutward(jobs.native(), jobs.lower_bound, 0) for _ in range(3))
    assert whole.advance(3_000 * len(jobs))
    assert again.advance(whole.work - again.work), "the last work unit of a budget counts"
    for _ in range(3_000):
        if parts.advance(2_000):
            break
    assert parts.offsets.tolist() == whole.offsets.tolist() == again.offsets.tolist()


@pytest.mark.parametrize(
    "buffers",
    [
        Buffers.of([0, 1], [2, 3], 8, offset=[0, -1]),
        Buffers.of([0, 1], [2, 3], [8, 4], alignment=8),
        Buffers.of([0, 2, 4], [3, 5, 7], 8, period=6),
    ],
    ids=["fixed", "padded", "circle"],
)
def test_unsupported_buffers_are_refused_and_left_to_other_kernels(buffers: Buffers) -> None:
    jobs = jobs_of(buffers)
    assert not can_pack_peak_outward(jobs)
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
    search = _core.PeakOutward(native, 1, 0)
    assert sys.getrefcount(native) == before + 1
    del search
    assert sys.getrefcount(native) == before


@pytest.mark.parametrize("mean_live", [100, 300], ids=["reached", "above the bound"])
def test_every_reported_plan_is_valid_and_smaller_than_the_best(mean_live: int) -> None:
    """Jobs far from the peak may end above the goal at first; window repair then lowers them."""
    buffers = flat(2_000, 0, mean_live=mean_live)
    jobs = jobs_of(buffers)
    search, best = PeakOutward(jobs.native(), 0), int(1.2 * jobs.lower_bound)
    while not search.rounds and best > jobs.lower_bound:
        if search.advance(10**6, jobs.lower_bound, best):
            assert search.offsets is not None
            assert search.arena < best
            best = search.arena
            check_offsets(buffers, of_buffers(jobs, search.offsets), best)
    assert best <= 1.05 * jobs.lower_bound


def test_plan_no_smaller_than_the_best_is_not_reported() -> None:
    jobs = jobs_of(scattered(1_000, 4))
    search = PeakOutward(jobs.native(), 0)
    while search.offsets is None:
        assert not search.advance(10**6, jobs.lower_bound, jobs.lower_bound)


@pytest.mark.parametrize("stage", ["begin", "advance"])
def test_limit_interrupts_a_slow_peak_outward_search(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for many buffers runs on a separate thread, which is abandoned at a limit."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        work, given_up = 0, False

        def __init__(self, *_: object) -> None:
            self.wait("begin")

        def wait(self, current: str) -> None:
            if current == stage:
                begun.set()
                assert go_on.wait(10)

        def advance(self, _: int) -> bool:
            self.wait("advance")
            return False

    monkeypatch.setattr(task_module, "OPTIONS", dataclasses.replace(OPTIONS, calling_thread=10))
    monkeypatch.setattr(_core, "PeakOutward", Slow)
    buffers = scattered(1_000, 0)
    try:
        plan = solve(buffers, stop=Stop(interrupt=begun.is_set), threads=1)
    finally:
        go_on.set()
    assert plan.stopped_by == "interrupt"
    check(plan, buffers)

"""Peak-outward packing: jobs alive at the peak first, then their neighbours in time, then the others."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from problem_classes import flat, scattered

from solvers import Status, Stop, _core, check, solve
from solvers.packing.greedy import can_pack_peak_outward
from solvers.packing.jobs import jobs_of
from solvers.packing.peak_outward import PeakOutward
from traces.buffers import Buffers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.packing.jobs import Jobs


def of_buffers(jobs: Jobs, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the offsets in the order of the buffers, all of which take memory."""
    result = np.empty(len(jobs), np.int64)
    result[jobs.row] = offsets
    return result


def check_offsets(buffers: Buffers, offsets: NDArray[np.int64], goal: int) -> None:
    """Check that the offsets are a valid plan whose arena is at most `goal` bytes."""
    arena = int((offsets + buffers.size).max())
    assert arena <= goal
    plan = solve(buffers, solver="first_fit")
    check(
        dataclasses.replace(plan, offset=offsets[:, None], arena_bytes=arena, status=Status.FEASIBLE), buffers
    )


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


def test_scattered_lifetimes_reach_the_load() -> None:
    buffers = scattered(1_000, 4)
    plan = solve(buffers, stop=Stop(nodes=4_000_000))
    check(plan, buffers)
    assert plan.status is Status.OPTIMAL


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

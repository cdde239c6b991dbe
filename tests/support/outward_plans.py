"""Offsets from the peak outward, as plans of buffers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from solvers import Status, _core, check, solve
from solvers.packing import greedy
from solvers.packing.jobs import jobs_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.packing.jobs import Jobs
    from traces.buffers import Buffers


def offsets_within(buffers: Buffers, goal: int, seed: int) -> NDArray[np.int64] | None:
    """Of the buffers in their order, all of which take memory; None where they are not found soon."""
    jobs = jobs_of(buffers)
    work = _core.PeakOutward(jobs.native(), goal, seed)
    if not work.advance(greedy.LOOKS_OF_SIDES * len(jobs)):
        return None
    assert work.arena == (work.offsets + jobs.size).max()
    return of_buffers(jobs, work.offsets)


def of_buffers(jobs: Jobs, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The offsets of the jobs as those of the buffers, which all take memory."""
    result = np.empty(len(jobs), np.int64)
    result[jobs.row] = offsets
    return result


def checked(buffers: Buffers, offsets: NDArray[np.int64], goal: int) -> None:
    """They are a plan, whose arena is at most the goal."""
    plan = solve(buffers, solver="first_fit")
    assert plan.offset is not None
    arena = int((offsets + buffers.size).max())
    assert arena <= goal
    check(
        dataclasses.replace(plan, offset=offsets[:, None], arena_bytes=arena, status=Status.FEASIBLE), buffers
    )

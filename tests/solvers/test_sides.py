"""Peak-outward sides in the portfolio: when the search runs, for which arenas, and the use of the offsets."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from outward_plans import checked, of_buffers, offsets_within

from solvers import Stop, _core, check, solve
from solvers.packing import greedy, peak_outward, worker_thread
from solvers.packing.jobs import jobs_of
from solvers.packing.peak_outward import Sides
from solvers.packing.task import Task, Watch
from traces.instances import flat, scattered

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces.buffers import Buffers


def test_low_load_at_the_peak_tries_peak_outward_search_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advanced, fullest, order = list[int](), _core.pack_max_load_first, list[str]()

    def filled(*args: Any) -> NDArray[np.int64]:
        order.append("fullest")
        return fullest(*args)

    class Watched:
        def __init__(self, *_: Any) -> None:
            self.work, self.given_up = 0, False

        def advance(self, budget: int) -> bool:
            order.append("outward")
            advanced.append(budget)
            self.work += budget
            return False

    monkeypatch.setattr(greedy._core, "PeakOutward", Watched)
    monkeypatch.setattr(greedy._core, "pack_max_load_first", filled)
    solve(flat(1_000, 0, mean_live=100), solver="greedy", stop=Stop(nodes=10**7))
    assert not advanced
    solve(flat(1_000, 0, mean_live=100), stop=Stop(nodes=10**8))
    assert advanced
    assert order[0] == "fullest"
    order.clear()
    advanced.clear()
    solve(scattered(1_000, 0), solver="greedy", stop=Stop(nodes=10**6))
    assert order[0] == "outward"
    assert 0 < sum(advanced) <= 10**6 // 2, "half of the budget is left to the others"
    advanced.clear()
    solve(scattered(1_000, 0), solver="greedy", stop=Stop(nodes=10**9))
    assert sum(advanced) == greedy.LOOKS_OF_SIDES * 1_000


def test_peak_outward_search_follows_slow_window_repair_for_many_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = list[str]()

    def watched(name: str) -> type:
        original = getattr(_core, name)

        class Watched:
            arena = 2**62

            def __init__(self, *args: Any) -> None:
                original(*args)
                order.append(name)
                self.work, self.given_up = 0, False

            def advance(self, budget: int, *_: int) -> bool:
                self.work += budget
                return False

        return Watched

    for name in ("PeakOutward", "WindowRepair"):
        monkeypatch.setattr(greedy._core, name, watched(name))
    monkeypatch.setattr(greedy, "_FEW", 100)
    jobs = jobs_of(flat(1_000, 0, mean_live=100))
    task = Task(jobs, Watch(Stop(nodes=2**40)))
    assert greedy.valleys(task) is not None
    assert order == ["WindowRepair", "PeakOutward", "WindowRepair"]
    order.clear()
    monkeypatch.setattr(greedy, "_MUCH", 0.01)  # what comes first does not come again
    assert greedy.valleys(Task(jobs, Watch(Stop(nodes=2**40)))) is not None
    assert order == ["PeakOutward", "WindowRepair"]


def test_peak_outward_search_runs_beside_window_repair_with_two_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The offsets found become the plan, though the repair finds nothing."""

    class Idle:
        arena = 2**62

        def __init__(self, *_: Any) -> None:
            self.work = 0

        def advance(self, *_: int) -> bool:
            time.sleep(0.001)
            return False

    monkeypatch.setattr(greedy._core, "WindowRepair", Idle)
    monkeypatch.setattr(greedy, "_FEW", 100)
    buffers = next(b for b in (flat(1_000, seed, mean_live=60) for seed in range(50)) if soon(b))
    task = Task(jobs_of(buffers), Watch(Stop()), threads=2)
    assert greedy.valleys(task) is None
    assert (task.arena, task.stopped_by) == (task.lower_bound, "bound")
    assert task.offsets is not None


def test_peak_outward_offsets_become_the_plan_beside_long_work_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a limit reached during the long work does not lose the offsets."""
    go_on = threading.Event()

    def fullest(*_: Any) -> None:
        assert go_on.wait(60), "it was waited for"

    monkeypatch.setattr(greedy._core, "pack_max_load_first", fullest)
    monkeypatch.setattr(greedy, "_FEW", 100)
    monkeypatch.setattr(worker_thread, "_SOON", 100)
    buffers = next(b for b in (flat(1_000, seed, mean_live=60) for seed in range(50)) if soon(b))
    task = Task(jobs_of(buffers), Watch(Stop()), threads=2)
    try:
        assert greedy.valleys(task) is None
    finally:
        go_on.set()
    assert (task.arena, task.stopped_by) == (task.lower_bound, "bound")
    assert task.others is None


def soon(buffers: Buffers) -> bool:
    """Return whether peak-outward search reaches the load with any seed, and no order does."""
    jobs = jobs_of(buffers)
    if solve(buffers, solver="skyline_area").arena_bytes == jobs.lower_bound:
        return False
    return all(offsets_within(buffers, jobs.lower_bound, seed) is not None for seed in range(3))


def test_given_up_peak_outward_round_leaves_the_budget_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the search would spend nothing, and the budget would never end."""
    advanced, asked = list[int](), list[tuple[int, int]]()

    class GivenUp:
        looks, given_up = 0, False

        def __init__(self, jobs: _core.Jobs, goal: int, seed: int, tries: int) -> None:
            asked.append((goal, seed))

        def advance(self, budget: int) -> bool:
            advanced.append(budget)
            self.work, self.given_up = self.work + 10_000, True
            return False

    monkeypatch.setattr(peak_outward._core, "PeakOutward", GivenUp)
    buffers = scattered(1_000, 0)
    enough = jobs_of(buffers).lower_bound + 5
    plan = solve(buffers, stop=Stop(nodes=10**6, target_bytes=enough), seed=-3, solver="greedy")
    check(plan, buffers)
    assert asked[0] == (enough, 2**64 - 3)
    assert [goal > enough for goal, _ in asked] == [False, True, True]
    assert len(advanced) == len(asked)
    assert plan.nodes > 30_000


def test_given_up_arena_is_followed_by_bisection_towards_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A found arena is followed by bisection towards the target."""
    asked, fits = list[tuple[int, int]](), 1_600

    class Deciding:
        def __init__(self, jobs: _core.Jobs, goal: int, seed: int, tries: int) -> None:
            asked.append((goal, tries))
            self.work, self.given_up = 1, False
            self.arena = goal
            self.offsets = np.array([goal])

        def advance(self, looks: int) -> bool:
            self.work += looks
            self.given_up = self.arena < fits
            return not self.given_up

    monkeypatch.setattr(peak_outward._core, "PeakOutward", Deciding)
    work, arena, found = Sides(jobs_of(flat(10, 0)).native(), 0), 2_000, list[int]()
    while not work.rounds:
        if work.advance(10, 1_000, arena):
            assert work.offsets is not None
            arena = int(work.offsets[0])
            found.append(arena)
    assert [goal for goal, _ in asked] == [1_000, 1_500, 1_750, 1_375, 1_562]
    assert found == [1_750]
    assert work.work == 11 * len(asked)
    work.advance(10, 1_000, arena)
    assert asked[-1][0] == 1_000
    assert asked[-1][1] > asked[0][1], "more tries in later rounds"


class Outward:
    """A stand-in whose offsets are too high far from the peak, for any goal."""

    goals: list[int]

    def __init__(self, jobs: _core.Jobs, goal: int, seed: int, tries: int) -> None:
        self.goals.append(goal)
        self.work, self.given_up, self.arena, self.offsets = 1, False, goal + 300, np.array([goal + 300])

    def advance(self, looks: int) -> bool:
        self.work += 1
        return True


class Stretches:
    """So much lower at each look, down to `least`."""

    least: int

    def __init__(self, jobs: _core.Jobs, offsets: NDArray[np.int64], seed: int) -> None:
        self.work, self.arena = 0, int(offsets[0])

    @property
    def offsets(self) -> NDArray[np.int64]:
        return np.array([self.arena])

    def advance(self, looks: int, target: int) -> bool:
        self.work += looks
        before, self.arena = self.arena, max(self.arena - 100, self.least, target)
        return self.arena < before


@pytest.mark.parametrize(
    ("least", "goals", "found"),
    [
        (0, [1_000, 1_000], [1_200, 1_100, 1_000]),
        (1_250, [1_000, 1_125, 1_187, 1_000], [1_250]),
    ],
    ids=["to the target", "until nothing becomes lower"],
)
def test_window_repair_refines_buffers_far_from_the_peak(
    least: int, goals: list[int], found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offsets above the goal are offered only below the best arena."""
    Outward.goals, Stretches.least = [], least
    monkeypatch.setattr(peak_outward._core, "PeakOutward", Outward)
    monkeypatch.setattr(peak_outward._core, "WindowRepair", Stretches)
    monkeypatch.setattr(peak_outward, "_PATIENCE", 25)
    work, arena, offered = Sides(jobs_of(flat(10, 0)).native(), 0), 1_300, list[int]()
    while len(Outward.goals) < len(goals):
        if work.advance(10, 1_000, arena):
            assert work.offsets is not None
            arena = work.arena
            assert int(work.offsets[0]) == arena
            offered.append(arena)
    assert Outward.goals == goals
    assert offered == found


def test_offsets_no_lower_than_the_best_are_not_offered() -> None:
    """Other threads may have found a better plan meanwhile."""
    jobs = jobs_of(scattered(1_000, 4))
    work = Sides(jobs.native(), 0)
    while work.offsets is None:
        assert not work.advance(10**6, jobs.lower_bound, jobs.lower_bound)


def test_lower_plans_are_found_in_turn_where_the_bound_is_not_reached() -> None:
    buffers = flat(2_000, 0, mean_live=300)
    jobs = jobs_of(buffers)
    work, arenas = Sides(jobs.native(), 0), [int(1.2 * jobs.lower_bound)]
    while not work.rounds:
        if work.advance(10**6, jobs.lower_bound, arenas[-1]):
            assert work.offsets is not None
            offsets = of_buffers(jobs, work.offsets)
            arenas.append(int((offsets + buffers.size).max()))
            checked(buffers, offsets, arenas[-2] - 1)
    assert len(arenas) > 2
    assert arenas[-1] > jobs.lower_bound, "else this instance is too easy"
    assert arenas[-1] <= 1.05 * jobs.lower_bound


@pytest.mark.parametrize("where", ["begin", "advance"])
def test_limit_is_obeyed_within_peak_outward_search(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for many buffers runs on a separate thread, which is left alone."""
    begun, go_on = threading.Event(), threading.Event()

    class Stuck:
        looks, given_up = 0, False

        def __init__(self, jobs: _core.Jobs, goal: int, seed: int, tries: int) -> None:
            self.work("begin")

        def work(self, now: str) -> None:
            if now == where:
                begun.set()
                assert go_on.wait(10), "it was waited for"

        def advance(self, budget: int) -> bool:
            self.work("advance")
            return False

    monkeypatch.setattr(worker_thread, "_SOON", 10)
    monkeypatch.setattr(greedy._core, "PeakOutward", Stuck)
    buffers = scattered(1_000, 0)
    try:
        plan = solve(buffers, stop=Stop(interrupt=begun.is_set), threads=1)
    finally:
        go_on.set()
    assert plan.stopped_by == "interrupt"
    check(plan, buffers)

"""What is alive at the peak first, then either side of it."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from solvers import Status, Stop, _core, aside, check, greedy, sides, solve
from solvers.jobs import jobs_of
from solvers.sides import Sides
from solvers.task import Task, Watch
from traces.buffers import Buffers
from traces.instances import flat, scattered

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.jobs import Jobs


def offsets_within(buffers: Buffers, goal: int, seed: int) -> NDArray[np.int64] | None:
    """Of the buffers in their order, all of which take memory; None where they are not found soon."""
    jobs = jobs_of(buffers)
    work = _core.Outward(jobs.native(), goal, seed)
    if not work.advance(greedy.LOOKS_OF_SIDES * len(jobs)):
        return None
    assert work.arena == (work.offsets + jobs.size).max()
    return of_buffers(jobs, work.offsets)


def of_buffers(jobs: Jobs, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The offsets of the jobs as those of the buffers, which all take memory."""
    result = np.empty(len(jobs), np.int64)
    result[jobs.row] = offsets
    return result


@st.composite
def stackable(draw: st.DrawFn) -> Buffers:
    """Few buffers whose sizes are multiples of their alignment."""
    times = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 30)), min_size=1, max_size=40))
    sizes = draw(st.lists(st.integers(1, 9), min_size=len(times), max_size=len(times)))
    alignment = draw(st.sampled_from([1, 2, 8]))
    start, length = np.array(times).T
    return Buffers.of(start, start + length, alignment * np.array(sizes), alignment=alignment)


def checked(buffers: Buffers, offsets: NDArray[np.int64], goal: int) -> None:
    plan = solve(buffers, solver="first_fit")
    assert plan.offset is not None
    arena = int((offsets + buffers.size).max())
    assert arena <= goal
    check(
        dataclasses.replace(plan, offset=offsets[:, None], arena_bytes=arena, status=Status.FEASIBLE), buffers
    )


@given(st.data())
@settings(max_examples=300)
def test_what_is_found_is_a_plan_near_the_peak_within_the_goal(data: st.DataObject) -> None:
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


def test_what_is_far_from_the_peak_never_makes_it_begin_anew() -> None:
    """Some of it is above the goal at first, and no longer after stretches of time have been filled anew."""
    above = 0
    for seed in range(10):
        buffers = flat(5_000, seed, mean_live=100)
        jobs = jobs_of(buffers)
        native, bound = jobs.native(), jobs.lower_bound
        work = _core.Outward(native, bound, 0)
        assert work.advance(10**9)
        checked(buffers, of_buffers(jobs, work.offsets), work.arena)
        above += work.arena > bound
        together = Sides(native, 0)
        while together.arena != bound and together.looks < 10**9:
            together.advance(10**6, bound, 2 * bound)
        assert together.offsets is not None
        checked(buffers, of_buffers(jobs, together.offsets), bound)
        assert not together.rounds
    assert above


@given(st.data())
@settings(max_examples=300)
def test_the_peak_first_and_either_side_in_order_make_a_plan(data: st.DataObject) -> None:
    buffers = data.draw(stackable())
    jobs = jobs_of(buffers)
    offsets = of_buffers(jobs, _core.peak_first(jobs.native(), _core.Cancel()))
    checked(buffers, offsets, int(buffers.size.sum()))


def test_the_peak_first_wastes_little_where_the_load_falls_from_one_peak() -> None:
    """A fourth of what earlier starts first wastes, if that, in the mean."""
    waste = much = 0
    for seed in range(8):
        jobs = jobs_of(scattered(20_000, seed))
        native = jobs.native()
        waste += arena_over(jobs, _core.peak_first(native, _core.Cancel()))
        much += arena_over(jobs, _core.skyline(native, native.earliest_first, _core.Cancel()))
    assert 4 * waste < much


def arena_over(jobs: Jobs, offsets: NDArray[np.int64]) -> int:
    """Bytes above the load."""
    return int((offsets + jobs.size).max()) - jobs.lower_bound


def test_the_peak_first_can_be_told_to_give_up() -> None:
    cancel = _core.Cancel()
    cancel.cancel()
    assert len(_core.peak_first(jobs_of(scattered(100, 0)).native(), cancel)) == 0


@pytest.mark.parametrize("n", [1_000, 10_000])
def test_most_scattered_lifetimes_are_at_the_load_after_one_pass(n: int) -> None:
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
def test_what_was_rejected_comes_back_and_nothing_rises_over_what_hangs(
    seed: int, small: list[tuple[int, int, int]]
) -> None:
    """Few, for which the load can be reached, and is only after steps have been taken back."""
    start, end, size = np.array(small).T
    buffers = Buffers.of(start, end, size)
    jobs = jobs_of(buffers)
    work = _core.Outward(jobs.native(), jobs.lower_bound, seed)
    assert work.advance(200_000)
    checked(buffers, work.offsets, jobs.lower_bound)


def test_a_stack_that_leans_to_the_harder_side_is_good_where_an_even_one_is_not() -> None:
    """With the first try alone these are 11."""
    found = 0
    for seed in range(20):
        buffers = flat(1_000, seed, mean_live=100)
        jobs = jobs_of(buffers)
        work = _core.Outward(jobs.native(), jobs.lower_bound, 0)
        while not work.given_up:
            if work.advance(10**6):
                found += 1
                checked(buffers, of_buffers(jobs, work.offsets), jobs.lower_bound)
                break
    assert found > 14


def test_below_the_load_there_is_nothing() -> None:
    jobs = jobs_of(scattered(100, 0))
    work = _core.Outward(jobs.native(), jobs.lower_bound - 1, 0)
    assert work.given_up
    looks = work.looks
    assert not work.advance(10**6)
    assert work.looks == looks


def test_before_all_is_placed_nothing_has_an_offset() -> None:
    jobs = jobs_of(scattered(100, 0))
    work = _core.Outward(jobs.native(), jobs.lower_bound, 0)
    assert work.offsets.tolist() == [-1] * len(jobs)
    assert work.arena == jobs.size.max() - 1


def test_after_many_failures_it_is_given_up() -> None:
    jobs = jobs_of(flat(5_000, 0, mean_live=1_500))
    work = _core.Outward(jobs.native(), jobs.lower_bound, 0)
    assert not work.given_up
    assert not work.advance(10**12)
    assert work.given_up


def test_what_is_filled_with_the_last_look_of_a_budget_is_found() -> None:
    jobs = jobs_of(scattered(1_000, 0))
    whole, work = (_core.Outward(jobs.native(), jobs.lower_bound, 0) for _ in range(2))
    assert whole.advance(10**9)
    assert work.advance(whole.looks - work.looks)
    assert work.looks == whole.looks
    assert (work.offsets == whole.offsets).all()


def test_what_it_takes_to_begin_is_counted() -> None:
    jobs = jobs_of(scattered(1_000, 0))
    work = _core.Outward(jobs.native(), jobs.lower_bound, 0)
    stacked = work.looks
    assert stacked >= len(jobs)
    assert not work.advance(1)
    assert work.looks >= stacked + 10 * len(jobs)


def test_a_goal_between_two_alignments_keeps_both_sides_aligned() -> None:
    buffers = scattered(1_000, 4)
    aligned = Buffers.of(buffers.start, buffers.end, -(-buffers.size // 64) * 64, alignment=64)
    goal = jobs_of(aligned).lower_bound + 63
    offsets = offsets_within(aligned, goal, 0)
    assert offsets is not None
    assert not (offsets % 64).any()
    checked(aligned, offsets, goal)


def test_the_same_seed_gives_the_same_offsets() -> None:
    buffers = scattered(1_000, 4)
    bound = jobs_of(buffers).lower_bound
    first, second = (offsets_within(buffers, bound, 7) for _ in range(2))
    assert first is not None
    assert second is not None
    assert first.tolist() == second.tolist()


def test_a_part_of_the_budget_at_a_time_comes_to_the_same() -> None:
    jobs = jobs_of(scattered(1_000, 4))
    whole, parts = (_core.Outward(jobs.native(), jobs.lower_bound, 0) for _ in range(2))
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
def test_what_it_does_not_take_is_refused_and_left_to_the_others(buffers: Buffers) -> None:
    jobs = jobs_of(buffers)
    assert not greedy.can_halve(jobs)
    with pytest.raises(ValueError, match=r"gaps|fixed offsets, or sizes that are not aligned"):
        _core.Outward(jobs.native(), 1 << 20, 0)
    with pytest.raises(ValueError, match=r"gaps|fixed offsets, or sizes that are not aligned"):
        _core.peak_first(jobs.native(), _core.Cancel())
    plan = solve(buffers)
    check(plan, buffers)
    assert plan.offset is not None


def test_of_no_jobs_there_is_no_peak() -> None:
    with pytest.raises(ValueError, match="there are none"):
        _core.Outward(jobs_of(Buffers.of([], [], [])).native(), 1, 0)


def test_the_jobs_live_as_long_as_what_packs_them() -> None:
    native = jobs_of(scattered(100, 0)).native()
    before = sys.getrefcount(native)
    work = _core.Outward(native, 1, 0)
    assert sys.getrefcount(native) == before + 1
    del work
    assert sys.getrefcount(native) == before


def test_where_little_is_alive_at_the_peak_what_is_alive_comes_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advanced, fullest, order = list[int](), _core.fullest, list[str]()

    def filled(*args: Any) -> NDArray[np.int64]:
        order.append("fullest")
        return fullest(*args)

    class Watched:
        def __init__(self, *_: Any) -> None:
            self.looks, self.given_up = 0, False

        def advance(self, budget: int) -> bool:
            order.append("halves")
            advanced.append(budget)
            self.looks += budget
            return False

    monkeypatch.setattr(greedy._core, "Outward", Watched)
    monkeypatch.setattr(greedy._core, "fullest", filled)
    solve(flat(1_000, 0, mean_live=100), solver="greedy", stop=Stop(nodes=10**7))
    assert not advanced
    solve(flat(1_000, 0, mean_live=100), stop=Stop(nodes=10**8))
    assert advanced
    assert order[0] == "fullest"
    order.clear()
    advanced.clear()
    solve(scattered(1_000, 0), solver="greedy", stop=Stop(nodes=10**6))
    assert order[0] == "halves"
    assert 0 < sum(advanced) <= 10**6 // 2, "half of the budget is left to the others"
    advanced.clear()
    solve(scattered(1_000, 0), solver="greedy", stop=Stop(nodes=10**9))
    assert sum(advanced) == greedy.LOOKS_OF_SIDES * 1_000


def test_of_many_it_comes_where_stretches_did_not_come_to_the_bound_soon(
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
                self.looks, self.given_up = 0, False

            def advance(self, budget: int, *_: int) -> bool:
                self.looks += budget
                return False

        return Watched

    for name in ("Outward", "Stretches"):
        monkeypatch.setattr(greedy._core, name, watched(name))
    monkeypatch.setattr(greedy, "_FEW", 100)
    jobs = jobs_of(flat(1_000, 0, mean_live=100))
    task = Task(jobs, Watch(Stop(nodes=2**40)))
    assert greedy.valleys(task) is not None
    assert order == ["Stretches", "Outward", "Stretches"]
    order.clear()
    monkeypatch.setattr(greedy, "_MUCH", 0.01)  # what comes first does not come again
    assert greedy.valleys(Task(jobs, Watch(Stop(nodes=2**40)))) is not None
    assert order == ["Outward", "Stretches"]


def test_with_two_threads_it_works_beside_the_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it finds is the plan, though the stretches find nothing."""

    class Idle:
        arena = 2**62

        def __init__(self, *_: Any) -> None:
            self.looks = 0

        def advance(self, *_: int) -> bool:
            time.sleep(0.001)
            return False

    monkeypatch.setattr(greedy._core, "Stretches", Idle)
    monkeypatch.setattr(greedy, "_FEW", 100)
    buffers = next(b for b in (flat(1_000, seed, mean_live=60) for seed in range(50)) if soon(b))
    task = Task(jobs_of(buffers), Watch(Stop()), threads=2)
    assert greedy.valleys(task) is None
    assert (task.arena, task.stopped_by) == (task.lower_bound, "bound")
    assert task.offsets is not None


def test_what_it_finds_beside_work_that_takes_long_is_the_plan_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So it is not lost either when a limit is reached in the middle of that."""
    go_on = threading.Event()

    def fullest(*_: Any) -> None:
        assert go_on.wait(60), "it was waited for"

    monkeypatch.setattr(greedy._core, "fullest", fullest)
    monkeypatch.setattr(greedy, "_FEW", 100)
    monkeypatch.setattr(aside, "_SOON", 100)
    buffers = next(b for b in (flat(1_000, seed, mean_live=60) for seed in range(50)) if soon(b))
    task = Task(jobs_of(buffers), Watch(Stop()), threads=2)
    try:
        assert greedy.valleys(task) is None
    finally:
        go_on.set()
    assert (task.arena, task.stopped_by) == (task.lower_bound, "bound")
    assert task.others is None


def soon(buffers: Buffers) -> bool:
    """Whether it is found, whatever the seed, and by no order."""
    jobs = jobs_of(buffers)
    if solve(buffers, solver="skyline_area").arena_bytes == jobs.lower_bound:
        return False
    return all(offsets_within(buffers, jobs.lower_bound, seed) is not None for seed in range(3))


def test_once_a_round_has_been_given_up_it_is_left_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on it would spend nothing, so nobody would ever come to the end of a budget."""
    advanced, asked = list[int](), list[tuple[int, int]]()

    class GivenUp:
        looks, given_up = 0, False

        def __init__(self, jobs: _core.Jobs, goal: int, seed: int, tries: int) -> None:
            asked.append((goal, seed))

        def advance(self, budget: int) -> bool:
            advanced.append(budget)
            self.looks, self.given_up = self.looks + 10_000, True
            return False

    monkeypatch.setattr(sides._core, "Outward", GivenUp)
    buffers = scattered(1_000, 0)
    enough = jobs_of(buffers).lower_bound + 5
    plan = solve(buffers, stop=Stop(nodes=10**6, target_bytes=enough), seed=-3, solver="greedy")
    check(plan, buffers)
    assert asked[0] == (enough, 2**64 - 3)
    assert [goal > enough for goal, _ in asked] == [False, True, True]
    assert len(advanced) == len(asked)
    assert plan.nodes > 30_000


def test_an_arena_that_is_given_up_is_followed_by_one_halfway_to_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what is found by one halfway to the target."""
    asked, fits = list[tuple[int, int]](), 1_600

    class Deciding:
        def __init__(self, jobs: _core.Jobs, goal: int, seed: int, tries: int) -> None:
            asked.append((goal, tries))
            self.looks, self.given_up = 1, False
            self.arena = goal
            self.offsets = np.array([goal])

        def advance(self, looks: int) -> bool:
            self.looks += looks
            self.given_up = self.arena < fits
            return not self.given_up

    monkeypatch.setattr(sides._core, "Outward", Deciding)
    work, arena, found = Sides(jobs_of(flat(10, 0)).native(), 0), 2_000, list[int]()
    while not work.rounds:
        if work.advance(10, 1_000, arena):
            assert work.offsets is not None
            arena = int(work.offsets[0])
            found.append(arena)
    assert [goal for goal, _ in asked] == [1_000, 1_500, 1_750, 1_375, 1_562]
    assert found == [1_750]
    assert work.looks == 11 * len(asked)
    work.advance(10, 1_000, arena)
    assert asked[-1][0] == 1_000
    assert asked[-1][1] > asked[0][1], "more tries in later rounds"


class Outward:
    """Too high far from the peak, whatever is asked for."""

    goals: list[int]

    def __init__(self, jobs: _core.Jobs, goal: int, seed: int, tries: int) -> None:
        self.goals.append(goal)
        self.looks, self.given_up, self.arena, self.offsets = 1, False, goal + 300, np.array([goal + 300])

    def advance(self, looks: int) -> bool:
        self.looks += 1
        return True


class Stretches:
    """So much lower at each look, down to `least`."""

    least: int

    def __init__(self, jobs: _core.Jobs, offsets: NDArray[np.int64], seed: int) -> None:
        self.looks, self.arena = 0, int(offsets[0])

    @property
    def offsets(self) -> NDArray[np.int64]:
        return np.array([self.arena])

    def advance(self, looks: int, target: int) -> bool:
        self.looks += looks
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
def test_stretches_far_from_the_peak_are_filled_anew(
    least: int, goals: list[int], found: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is above the goal is offered only where it is lower than the best."""
    Outward.goals, Stretches.least = [], least
    monkeypatch.setattr(sides._core, "Outward", Outward)
    monkeypatch.setattr(sides._core, "Stretches", Stretches)
    monkeypatch.setattr(sides, "_PATIENCE", 25)
    work, arena, offered = Sides(jobs_of(flat(10, 0)).native(), 0), 1_300, list[int]()
    while len(Outward.goals) < len(goals):
        if work.advance(10, 1_000, arena):
            assert work.offsets is not None
            arena = work.arena
            assert int(work.offsets[0]) == arena
            offered.append(arena)
    assert Outward.goals == goals
    assert offered == found


def test_what_comes_no_lower_is_not_offered() -> None:
    """Others may have found better meanwhile."""
    jobs = jobs_of(scattered(1_000, 4))
    work = Sides(jobs.native(), 0)
    while work.offsets is None:
        assert not work.advance(10**6, jobs.lower_bound, jobs.lower_bound)


def test_where_the_bound_is_not_reached_lower_plans_are_found_one_after_the_other() -> None:
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
def test_a_limit_is_obeyed_in_the_middle_of_it(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many, it works on a thread of its own, which is left to itself."""
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

    monkeypatch.setattr(aside, "_SOON", 10)
    monkeypatch.setattr(greedy._core, "Outward", Stuck)
    buffers = scattered(1_000, 0)
    try:
        plan = solve(buffers, stop=Stop(interrupt=begun.is_set), threads=1)
    finally:
        go_on.set()
    assert plan.stopped_by == "interrupt"
    check(plan, buffers)

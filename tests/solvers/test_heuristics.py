"""Packing kernels on their own: every placement is a valid plan, every bound a lower bound."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
import threading
from typing import TYPE_CHECKING

import instances
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import crossing, padded

from solvers import Plan, PlanError, Status, Stop, _core, check, solve
from solvers.packing import task as task_module
from solvers.packing.jobs import jobs_of
from solvers.packing.options import OPTIONS
from solvers.packing.portfolio import Portfolio, repair_and_pair, repair_and_search
from solvers.packing.progress import Budget
from solvers.packing.task import Task, run_aside
from traces.buffers import Buffers

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from solvers.packing.portfolio import Work


def plan_of(buffers: Buffers, offsets: NDArray[np.int64]) -> Plan:
    """Build a plan of buffers of positive size, with one job for each buffer."""
    arena = int((offsets + buffers.size).max(initial=0))
    return Plan(offsets[:, None], arena, 0, Status.FEASIBLE, "", 0, 0.0, "", buffers.period)


@st.composite
def taking(draw: st.DrawFn, most: int = 12, *, circle: bool = True) -> Buffers:
    """Buffers of positive size with one address each: on a line or a circle, aligned or not, without gaps."""
    n = draw(st.integers(1, most))
    period = draw(st.none() | st.integers(2, 12)) if circle else None

    def column(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=n, max_size=n))

    start = column(0, 11 if period is None else period - 1)
    end = np.add(start, column(1, 9 if period is None else period))
    alignment = 2 ** np.array(column(0, draw(st.integers(0, 3))))
    return Buffers.of(start, end, column(1, 9), alignment=alignment, period=period)


def test_repair_searches_above_a_ground_of_uncountable_height() -> None:
    """The buffers on the ground cannot stand lower, so the repair searches."""
    n, high, top = 160, 2**56, crossing()
    each, uneven = np.arange(n), 2**50 + 1 + np.arange(n) % 2
    best = solve(top).offset
    assert best is not None
    buffers = Buffers.of(
        [0, *each, *20 * top.start],
        [n, *(each + 1), *20 * top.end],
        [high - 2**50, *uneven, *2**30 * top.size],
    )
    begin = np.array([0, *np.full(n, high - 2**50), *(high + 2 + 2**30 * best[:, 0])])
    repair = _core.LocalRepair(jobs_of(buffers).native(), begin, 0)
    for _ in range(10):
        assert not repair.advance(1_000_000, high + 2 + 8 * 2**30)
    check(plan_of(buffers, repair.offsets), buffers)


def test_cancelled_kernels_return_no_offsets() -> None:
    jobs = jobs_of(instances.scattered(100, 0))
    native, order, cancel = jobs.native(), np.arange(100, dtype=np.int32), _core.Cancel()
    cancel.cancel()
    assert len(_core.pack_in_order(native, order, cancel)) == 0
    assert len(_core.pack_max_load_first(native, order, jobs.lower_bound, cancel)) == 0


def least_stack(buffers: Buffers) -> int:
    """Return the lowest top of all stacking orders of buffers that all meet, each as low as possible."""
    best = 2**62
    fixed = [(int(a), int(a + s)) for a, s in zip(buffers.offset, buffers.size, strict=True) if a >= 0]
    free = np.flatnonzero(buffers.offset < 0)
    for order in itertools.permutations(free.tolist()):
        top = 0
        for i in order:
            step, size = int(buffers.alignment[i]), int(buffers.size[i])
            at = -(-top // step) * step
            while clashes := [high for low, high in fixed if low < at + size and at < high]:
                at = -(-max(clashes) // step) * step
            top = at + size
        best = min(best, max([top, *(high for _, high in fixed)]))
    return best


@given(taking(6, circle=False), st.booleans())
def test_stack_bound_equals_the_top_of_the_best_order(buffers: Buffers, pinned: bool) -> None:
    n = len(buffers)
    offset = np.full(n, -1)
    if pinned:
        offset[0] = 3 * buffers.alignment[0]
    meeting = Buffers.of([0] * n, [1] * n, buffers.size, alignment=buffers.alignment, offset=offset)
    assert _core.stack_bound(jobs_of(meeting).native(), 1_000_000) == least_stack(meeting)


@given(taking(8, circle=False), st.integers(0, 60))
def test_attainable_arena_is_a_fixed_point_at_the_sum_of_size_and_aligned_offset(
    buffers: Buffers, arena: int
) -> None:
    jobs = jobs_of(buffers)
    plan = solve(buffers, columns=1)
    if plan.status is Status.OPTIMAL:
        assert jobs.attainable(plan.arena_bytes) == plan.arena_bytes
    attainable = jobs.attainable(arena)
    assert attainable >= arena
    assert jobs.attainable(attainable) == attainable
    steps = np.lcm(buffers.alignment, jobs.unit)
    assert any((attainable - size) % step == 0 for size, step in zip(buffers.size, steps, strict=True))


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Task:
    """A task whose work all runs on the worker thread, and which has offsets."""
    monkeypatch.setattr(task_module, "OPTIONS", dataclasses.replace(OPTIONS, calling_thread=0))
    task = Task(jobs_of(instances.flat(50, 0)), Budget(Stop()))
    task.offer(np.arange(50) << 40, 50 << 40)
    return task


def waiting(begun: threading.Event) -> Callable[[_core.Cancel], None]:
    """Work that ends only when cancelled."""

    def work(cancel: _core.Cancel) -> None:
        begun.set()
        jobs = jobs_of(instances.flat(20, 0)).native()
        order = np.arange(20, dtype=np.int32)
        while len(_core.pack_in_order(jobs, order, cancel)):
            pass

    return work


def test_worker_thread_returns_the_result_or_raises_the_error(many: Task) -> None:
    assert run_aside(many, lambda _: threading.current_thread().name) == "packing"
    with pytest.raises(ZeroDivisionError):
        run_aside(many, lambda _: 1 // 0)


@pytest.mark.parametrize("raises", [False, True])
def test_limit_or_keyboard_interrupt_ends_the_work_on_the_worker_thread(many: Task, raises: bool) -> None:
    begun = threading.Event()

    def interrupt() -> bool:
        if raises and begun.is_set():
            raise KeyboardInterrupt
        return begun.is_set()

    many.budget.stop = Stop(interrupt=interrupt)
    with pytest.raises(KeyboardInterrupt) if raises else contextlib.nullcontext():
        assert run_aside(many, waiting(begun)) is None
        assert many.stopped_by == "interrupt"
    for thread in threading.enumerate():
        if thread.name == "packing":
            thread.join()


def hard() -> Buffers:
    """No order comes near the load at once."""
    random = np.random.default_rng(5)
    start = random.integers(0, 60, 200)
    return Buffers.of(start, start + random.integers(1, 30, 200), random.integers(1, 1 << 20, 200))


def packing_threads() -> int:
    return sum(thread.name.startswith("packing") for thread in threading.enumerate())


def assert_no_packing_thread() -> None:
    """Assert that no packing thread is working any more; a thread may need a moment to finish."""
    for thread in threading.enumerate():
        if thread.name.startswith("packing"):
            thread.join(60)
    assert packing_threads() == 0


def test_several_threads_search_and_all_end() -> None:
    """The instance keeps a single thread busy for long."""
    buffers, seen = padded(instances.flat(10_000, 0)), list[int]()

    def enough() -> bool:
        seen.append(packing_threads())
        return seen.count(2) > 3

    plan = solve(buffers, stop=Stop(interrupt=enough), threads=3)
    check(plan, buffers)
    assert plan.stopped_by == "interrupt"
    assert max(seen) == 2
    assert_no_packing_thread()


def test_interrupted_start_of_the_portfolio_ends_the_started_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that have started end; nobody waits for a thread that has not."""
    buffers = padded(instances.flat(10_000, 0))
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name.startswith("packing "):
            start(thread)
            raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    plan = solve(buffers, stop=Stop(interrupt=lambda: False), threads=3)
    check(plan, buffers)
    assert plan.stopped_by == "interrupt"
    assert_no_packing_thread()


def test_limit_does_not_wait_for_a_search_among_very_many_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The offsets of the abandoned search, which may be changing, are not taken over."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    class Slow:
        arena, work = 2**62, 0

        def __init__(self, *_: object) -> None:
            pass

        @property
        def offsets(self) -> NDArray[np.int64]:
            raise AssertionError("the offsets of a running search")

        def advance(self, *_: int) -> bool:
            begun.set()
            go_on.wait(60)
            ended.set()
            return True

    buffers = padded(instances.flat(2_000, 0))
    monkeypatch.setattr(_core, "LocalRepair", Slow)
    monkeypatch.setattr(task_module, "OPTIONS", dataclasses.replace(OPTIONS, calling_thread=100))
    try:
        plan = solve(buffers, stop=Stop(interrupt=begun.is_set), threads=1)
        assert plan.stopped_by == "interrupt"
        assert not ended.is_set()
        check(plan, buffers)
    finally:
        go_on.set()
        assert ended.wait(60)
        assert_no_packing_thread()


@pytest.mark.parametrize("work", [repair_and_search, repair_and_pair])
def test_refutation_by_the_portfolio_raises_the_lower_bound(work: Work) -> None:
    task = Task(jobs_of(crossing()), Budget(Stop()))
    task.offer(np.array([0, 3, 8, 10, 13, 16, 18]), 22)
    portfolio = Portfolio(task, [work])
    try:
        while not task.done():
            portfolio.share(task)
    finally:
        portfolio.end()
    assert (task.arena, task.lower_bound, task.stopped_by) == (9, 9, "proof")


@settings(max_examples=50)
@given(taking(8), taking(4, circle=False))
def test_grown_plan_keeps_the_former_offsets(old: Buffers, more: Buffers) -> None:
    plan = solve(old, columns=1, stop=Stop(nodes=100_000))
    columns = {
        name: np.concatenate([getattr(plan.keep(old), name), getattr(more, name)])
        for name in ("size", "alignment", "offset")
    }
    first = more.start if old.period is None else more.start % old.period
    last = first + (more.lengths if old.period is None else np.minimum(more.lengths, old.period))
    grown = Buffers.of(
        np.concatenate([old.start, first]),
        np.concatenate([old.end, last]),
        columns["size"],
        alignment=columns["alignment"],
        offset=columns["offset"],
        period=old.period,
    )
    larger = solve(grown, columns=1, stop=Stop(nodes=100_000))
    check(larger, grown)
    assert larger.offset is not None
    assert plan.offset is not None
    assert (larger.offset[: len(old)] == plan.offset).all()


def test_plans_without_fixed_single_offsets_cannot_be_kept() -> None:
    buffers = Buffers.of([0, 1], [3, 4], [1, 1], period=2)
    several = solve(buffers)
    assert several.columns > 1
    with pytest.raises(PlanError, match="addresses in turn"):
        several.keep(buffers)
    one = solve(buffers.select([0]), columns=2)
    with pytest.raises(PlanError, match="2 buffers, and offsets for 1"):
        dataclasses.replace(one, offset=np.zeros((1, 1))).keep(buffers)
    with pytest.raises(PlanError, match="without offsets"):
        solve(hard(), capacity=1).keep(hard())


def test_kernel_keeps_its_jobs_alive() -> None:
    jobs = jobs_of(instances.scattered(100, 0))
    native, offsets = jobs.native(), solve(instances.scattered(100, 0)).offset
    assert offsets is not None
    before = sys.getrefcount(native)
    search = _core.LocalRepair(native, offsets[jobs.row, 0], 0)
    assert sys.getrefcount(native) == before + 1
    del search
    assert sys.getrefcount(native) == before

"""Events that wake the planner's thread, which sleeps otherwise, and the planner's budget."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import programs
import pytest
from fake_cuda import FakeCuda
from hypothesis import given
from hypothesis import strategies as st
from pools import run, simulated

from mempool import Pool, _core
from mempool.planning.learner import Learner
from mempool.planning.options import OPTIONS
from mempool.planning.planner_thread import ProcessorBudget


class Turns:
    """Counts how often a pool's planner returns to Python."""

    def __init__(self, pool: Pool) -> None:
        assert pool.planner is not None
        self.count = 0
        self._turn = pool.planner._turn
        pool.planner._turn = self._counted  # type: ignore[method-assign]

    def _counted(self, *, work: bool) -> bool:
        self.count += 1
        return self._turn(work=work)


def until(done: Callable[[], bool], iteration: Callable[[], None], seconds: float = 120.0) -> None:
    """Run iterations with short pauses until a condition holds."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it was not heard of"
        iteration()
        time.sleep(0.0005)


def settled(pool: Pool, memory: programs.Watched) -> None:
    """Run a loop without marks until recording has stopped."""
    until(
        lambda: pool.state == "replaying" and not pool.client.state()["recording"],
        lambda: programs.layers(memory),
    )


def test_planner_sleeps_while_the_program_follows_its_plan() -> None:
    with Pool(simulated()) as pool:
        memory = programs.Watched(pool)
        settled(pool, memory)
        turns = Turns(pool)
        deadline = time.monotonic() + 1.5
        until(lambda: time.monotonic() > deadline, lambda: programs.layers(memory))
        assert turns.count <= 1  # a turn in progress when the count starts


def marked(pool: Pool, memory: programs.Watched, scale: int = 1024) -> Callable[[], None]:
    def iteration() -> None:
        pool.step()
        programs.layers(memory, scale=scale)

    return iteration


def test_difference_after_the_end_of_recording_wakes_the_planner() -> None:
    """An evaluation after every forty steps: too rare to disturb, and more than one in a thousand."""
    with Pool(simulated()) as pool:
        memory = programs.Watched(pool)
        iteration = marked(pool, memory)
        until(lambda: pool.state == "replaying" and not pool.client.state()["recording"], iteration)

        def epoch() -> None:
            for _ in range(40):
                iteration()
            for layer in range(12):
                memory.free(memory.allocate(50_000 + 3_000 * layer))
            assert pool.client.state()["miss_score"] < _core.CHANGED_SCORE

        for _ in range(600):  # long before the planner checks whether iterations follow the plan
            epoch()
            time.sleep(0.03)
            if pool.client.state()["recording"]:
                break
        assert pool.client.state()["recording"]


def test_permanent_change_wakes_the_planner_during_any_pause() -> None:
    with Pool(simulated()) as pool:
        memory = programs.Watched(pool)
        iteration = marked(pool, memory)
        until(lambda: pool.state == "replaying" and not pool.client.state()["recording"], iteration)
        until(lambda: pool.client.state()["recording"], marked(pool, memory, scale=4096))


def test_other_shapes_after_the_end_of_recording_are_planned() -> None:
    """Without marks, a program off its pattern reaches no boundary that would wake the planner."""
    with Pool(simulated()) as pool:
        memory = programs.Watched(pool)
        settled(pool, memory)
        plans = pool.plans
        for _ in range(200):
            programs.layers(memory)
        until(
            lambda: pool.plans > plans,
            lambda: programs.layers(memory, count=14, scale=4096),
        )


@pytest.mark.parametrize("condition", ["mark", "wait", "more memory"])
def test_little_host_memory_is_planned_on_request_only(
    condition: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(OPTIONS), "min_host_bytes", 1 << 20)
    with Pool(simulated(), background=False) as pool:
        memory = programs.Watched(pool)

        def repeat(scale: int = 1024, *, mark: bool = False) -> None:
            for _ in range(20):
                if mark:
                    pool.step()
                programs.layers(memory, scale=scale)
                pool.planner.run_once(0.0)

        repeat()
        assert pool.plans == 0
        assert "a plan for less than 1 MiB saves nothing" in pool.report().to_dict()["no_plan"]
        if condition == "wait":
            pool.wait(0.0)
        repeat(1 << 15 if condition == "more memory" else 1024, mark=condition == "mark")
        assert pool.plans > 0


def test_little_gpu_memory_is_planned(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(OPTIONS), "min_host_bytes", 1 << 20)
    with Pool(fake.device(), background=False) as pool:
        memory = programs.Watched(pool)
        for _ in range(20):
            programs.layers(memory)
            pool.planner.run_once(0.0)
        assert pool.plans > 0


def unlike_any(memory: programs.Watched, sizes: random.Random) -> None:
    """Allocate buffers alive at once, large in one iteration and small in another."""
    for address in [memory.allocate(sizes.randrange(600, 1_000_000)) for _ in range(8)]:
        memory.free(address)


def test_marks_of_a_program_without_repetition_wake_the_planner_ever_more_rarely() -> None:
    """The more looks were in vain, the more events must precede another look."""
    begun = time.monotonic()
    with Pool(simulated()) as pool:
        memory = programs.Watched(pool)
        turns = Turns(pool)
        sizes = random.Random(1)
        for _ in range(600):
            pool.step()
            unlike_any(memory, sizes)
            time.sleep(0.001)  # leaves time for the planner's thread
        assert pool.client.state()["recording"]
        passed = time.monotonic() - begun
        assert turns.count < 60 + passed / OPTIONS.turn_seconds  # turns until a look is paid


def test_plan_now_waits_for_the_background_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner's thread is held at work until another thread asks for a plan."""
    entered, go_on = threading.Event(), threading.Event()
    at_work: list[str] = []
    met: list[list[str]] = []
    learn = Learner.learn

    def held(learner: Learner) -> bool:
        at_work.append(threading.current_thread().name)
        met.append(list(at_work))
        if at_work[-1] == "mempool-planner":
            entered.set()
            assert go_on.wait(60)
        try:
            return learn(learner)
        finally:
            at_work.pop()

    monkeypatch.setattr(Learner, "learn", held)
    with Pool(simulated()) as pool:
        memory = programs.Watched(pool)
        until(entered.is_set, marked(pool, memory))
        other = threading.Thread(target=pool.plan_now)
        other.start()
        other.join(0.2)
        waited = other.is_alive()
        go_on.set()
        other.join()
        assert waited
    assert max(len(those) for those in met) == 1


def test_reset_pool_records_again_and_follows_no_plan() -> None:
    with Pool(simulated()) as pool:
        memory = programs.Watched(pool)
        settled(pool, memory)
        pool.reset_plans()
        until(lambda: pool.client.state()["recording"], lambda: None)
        assert (pool.client.patterns(), pool.planned) == ([], None)
        settled(pool, memory)


def test_failure_does_not_end_planning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learn = Learner.learn
    failing = True
    tried: list[int] = []

    def perhaps(learner: Learner) -> bool:
        if failing:
            tried.append(pool.client.state()["allocations"])
            raise MemoryError("not now")
        return learn(learner)

    monkeypatch.setattr(Learner, "learn", perhaps)
    with Pool(simulated()) as pool:
        memory = programs.Watched(pool)
        until(lambda: len(tried) >= 3, lambda: programs.layers(memory))
        assert len(caplog.records) == 1
        gaps = [later - earlier for earlier, later in itertools.pairwise(tried)]
        assert all(gap >= 4 * _core.MIN_PAUSE << k for k, gap in enumerate(gaps))
        failing = False
        until(lambda: pool.plans > 0, lambda: [programs.layers(memory) for _ in range(20)])


def test_signal_handler_may_request_a_plan_within_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pool(simulated(), background=False) as pool:
        learn = Learner.learn
        asked: list[bool] = []

        def interrupted(learner: Learner) -> bool:
            asked.append(pool.plan_now())
            return learn(learner)

        monkeypatch.setattr(Learner, "learn", interrupted)
        pool.plan_now()
    assert asked == [False]


LONG = 100.0


class Waiting:
    """A thread that waits like a planner for given conditions."""

    def __init__(self, client: _core.Client, seconds: float = LONG, **wait: float) -> None:
        self._heard: list[tuple[bool, float]] = []
        self._thread = threading.Thread(
            target=lambda: self._heard.append(client.wait_for_work(seconds, **wait))
        )
        self._thread.start()

    def is_over(self, seconds: float = 0.7) -> bool:
        """Return whether the wait ends within the time; a healthy wait ends in a third of the time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def news(self) -> bool:
        """Return the result of the wait once over."""
        assert self.is_over(LONG / 2), "it waited for its whole time"
        return self._heard[0][0]


@contextmanager
def recording() -> Iterator[Pool]:
    with Pool(simulated(), background=False) as pool:
        assert pool.client.state()["recording"]
        yield pool


def never_the_same(pool: Pool, count: int, seed: int = 0) -> None:
    sizes = random.Random(seed)
    for _ in range(count):
        pool.free(pool.allocate(sizes.randrange(600, 1 << 20)))


@pytest.mark.parametrize("what", ["wake", "work"])
def test_work_and_wake_up_end_the_wait_at_once(what: str) -> None:
    with recording() as pool:
        waiting = Waiting(pool.client)
        for _ in range(40 if what == "work" else 0):
            pool.free(pool.allocate(5000))
        if what == "wake":
            pool.client.wake()
        assert waiting.news() == (what == "work")


def test_wrapped_ring_ends_the_wait() -> None:
    """The planner has to decide whether the recording is still worth the cost."""
    core = _core.Pool(device=simulated(), recorded_events=1000)
    client = _core.Client(core, "test")
    client.set_recording(True)
    waiting = Waiting(client, search_seconds=LONG)
    sizes = random.Random(0)
    for _ in range(200):
        for _ in range(50):
            client.free(client.allocate(sizes.randrange(600, 1 << 20)))
        if waiting.is_over(0.01):
            break
    assert waiting.news()
    assert client.state()["events_dropped"]


def test_wait_ends_at_a_number_of_allocations_or_when_recording_is_due() -> None:
    with recording() as pool:
        waiting = Waiting(pool.client, search_seconds=LONG, allocations=1000)
        never_the_same(pool, 999)
        assert not waiting.is_over()
        never_the_same(pool, 1)
        assert not waiting.news()
        pool.client.advance_recording("failed")
        waiting = Waiting(pool.client, search_seconds=LONG)
        assert not waiting.is_over()
        never_the_same(pool, 4200)
        assert not waiting.news()
        assert pool.client.state()["recording_due"]


def test_wait_ends_when_the_arena_was_refused() -> None:
    with Pool(simulated(capacity=4 << 20), background=False) as pool:
        memory = programs.Watched(pool)
        run(pool, lambda _: programs.layers(memory, scale=1 << 15), 10, marks=True)
        pool.client.set_recording(False)
        assert pool.client.give_back(force=True)
        hog = memory.allocate(4 << 20)
        waiting = Waiting(pool.client, search_seconds=LONG)
        assert not waiting.is_over()
        pool.step()
        assert not waiting.news()
        assert pool.core.stats()["arena_refused"]
        again = Waiting(pool.client, search_seconds=LONG)
        assert not again.is_over(), "it is told of once"
        pool.client.wake()
        memory.free(hog)


def test_idle_memory_is_returned_during_a_wait() -> None:
    with recording() as pool:
        pool.free(pool.allocate(64 << 20))
        reserved = pool.core.stats()["reserved"]["current"]
        waiting = Waiting(pool.client, seconds=3.5)
        assert reserved >= 64 << 20
        assert not waiting.news()
        assert pool.core.stats()["reserved"]["current"] < 1 << 20


class Times:
    """A wall's clock and a processor's, set by hand."""

    def __init__(self) -> None:
        self.now = self.spent = 0.0

    def budget(self, **how: float) -> ProcessorBudget:
        return ProcessorBudget(**how, clock=lambda: self.now, spent=lambda: self.spent)


@given(
    passing=st.lists(st.floats(0, 10), min_size=1, max_size=50),
    costs=st.lists(st.floats(0, 0.5), min_size=50, max_size=50),
)
def test_spending_stays_within_allowance_share_and_a_single_piece_of_work(
    passing: list[float], costs: list[float]
) -> None:
    """Work that asks before each piece spends at most allowance, share of the time and last piece."""
    times = Times()
    budget = times.budget(allowance=0.1, share=0.01, most_debt=10.0)
    for wait, cost in zip(passing, costs, strict=False):
        times.now += wait
        if budget.is_positive():
            with budget.charge_thread():
                times.spent += cost
    assert times.spent <= 0.1 + 0.01 * times.now + max(costs) + 1e-9


def test_debt_is_forgiven_in_bounded_time() -> None:
    times = Times()
    budget = times.budget(allowance=0.1, share=0.01, most_debt=0.2)
    with budget.charge_thread():
        times.spent += 1000
    times.now = 19.0
    assert not budget.is_positive()
    times.now = 21.0
    assert budget.is_positive()


def test_useful_work_is_not_charged() -> None:
    """A finished plan does not delay the next."""
    times = Times()
    budget = times.budget(allowance=0.1, share=0.0, most_debt=0.2)
    with budget.charge_thread() as forgive:
        times.spent += 1000
        forgive()
    assert budget.is_positive()

"""Programs over long times: lifecycles of pools, and progress after any history."""

from __future__ import annotations

import gc
import math
import random
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
import pytest
from combinations import combinations
from divergence import Planning, Watcher
from hypothesis import example, given, note, settings
from pools import simulated
from sequences import FOR_GOOD, Event, Iteration, Player

import mempool.numpy
from mempool import OutOfMemoryError, Pool, _core

#: A day of training at a hundred iterations a second.
DAY = 24 * 3600 * 100


@pytest.mark.parametrize(("background", "times"), [(False, 1000), (True, 60)])
def test_repeated_install_and_uninstall_leaves_nothing(background: bool, times: int) -> None:
    """Each time arrays of the former pool are alive, and freed while another pool serves."""
    before, threads = _core.live_objects(), threading.active_count()
    kept: list[np.ndarray] = []
    for number in range(times):
        with mempool.numpy.install(background=background):
            kept.append(np.full(1000 + number, number))
            total = sum(int(np.full(600 + k, k).sum()) for k in range(5))
            assert total == sum((600 + k) * k for k in range(5))
        if len(kept) > 3:
            oldest = kept.pop(0)
            assert int(oldest[0]) == int(oldest[-1]) == number - 3
            del oldest
    assert _core.live_objects()["pools"] <= before["pools"] + 4
    kept.clear()
    gc.collect()
    assert _core.numpy_hook().held() == 0
    assert _core.live_objects() == before
    assert threading.active_count() == threads


@pytest.fixture
def frugal() -> Iterator[_core.SimulatedDevice]:
    device = simulated()
    yield device
    assert device.counts().live_reservations == 0
    assert device.counts().committed == 0


@pytest.mark.parametrize("lasts", [1, 5, 16])
def test_failure_of_any_device_call_loses_nothing(frugal: _core.SimulatedDevice, lasts: int) -> None:
    """All device calls fail for some iterations of recording, planning and replay, and then succeed again."""
    refused = -1
    for calls in range(200):
        before = frugal.counts().refusals
        with Pool(frugal, background=False) as pool:
            frugal.fail_after(calls)
            alive: list[int] = []
            worked = 1 << 40
            for number in range(40):
                if worked == 1 << 40 and frugal.counts().refusals > before:
                    worked = number + lasts
                if number == worked:
                    frugal.fail_after(1 << 40)
                pool.step()
                for k in range(6):
                    try:
                        alive.append(pool.allocate(100_000 * (k + 1) + 600 * (number == 9)))
                    except OutOfMemoryError:
                        continue
                while alive:
                    pool.free(alive.pop())
                pool.plan_now()
            frugal.fail_after(1 << 40)
            assert pool.report().to_dict()["live_bytes"] == 0
            assert pool.state == "replaying"
        refused = frugal.counts().refusals - before
        if refused == 0:  # all calls have been tried
            break
    assert refused == 0
    assert calls >= 6


def iterate(count: int) -> None:
    """Train with an occasional difference; assert that the pool's tables and memory do not grow."""
    memory, rng = Planning(marks=True, every=200), random.Random(0)
    player = Player(memory)
    sizes = [70_000, 30_000, 110_000]
    always = [Event(k, size) for k, size in enumerate(sizes)] + [Event(k) for k in range(len(sizes))]
    seen: list[dict[str, int]] = []
    for number in range(count):
        memory.mark()
        if number % 1000 == 999:
            extra = 1000 + rng.randrange(100_000)
            player.play([Event(9, extra), *always, Event(9)])
        elif number % 5000 == 4998:
            player.play(
                [Event(k, rng.randrange(600, 200_000)) for k in range(5)] + [Event(k) for k in range(5)]
            )
        else:
            player.play(always)
        if number in (count // 4, count - 1):
            core = memory.core.stats()
            counts = {name: core[name] for name in ("arena_bytes", "table_bytes")} | _core.live_objects()
            counts |= {"reserved": core["reserved"]["current"], "patterns": len(memory.client.patterns())}
            seen.append(counts)
    early, late = seen
    early["reserved"] += 1 << 20  # free segments, for the differences
    assert all(late[name] <= early[name] for name in early), (early, late)
    assert memory.hits >= 0.99 * 3 * count


def test_long_run_holds_no_more_memory_than_a_short_run() -> None:
    iterate(60_000)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_day_of_iterations_holds_no_more_memory_than_an_hour() -> None:
    iterate(DAY)


def test_iteration_interrupted_at_its_begin_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come at any moment."""

    class Interrupted:
        def mark(self, kind: _core.Mark) -> None:
            if kind == _core.Mark.BEGIN:
                raise KeyboardInterrupt

    with Pool(simulated(), background=False) as pool:
        with monkeypatch.context() as patched:
            patched.setattr(pool, "client", Interrupted())
            with pytest.raises(KeyboardInterrupt), pool.iteration():
                pass
        with pool.iteration():
            pool.free(pool.allocate(1000))
        pool.step()


def test_child_forked_in_another_threads_iteration_is_in_no_iteration() -> None:
    script = """
        import os, threading, warnings
        import mempool.numpy
        warnings.simplefilter("ignore", DeprecationWarning)
        pool = mempool.numpy.install()
        inside, over = threading.Event(), threading.Event()
        def work():
            with pool.iteration():
                inside.set()
                over.wait()
        thread = threading.Thread(target=work)
        thread.start()
        inside.wait()
        child = os.fork()
        if child == 0:
            with pool.iteration():
                pass
            pool.step()
            os._exit(0)
        over.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)


#: Iterations until a plan is in effect at the beginning of a program, and number of checked iterations.
SOON, LOOKED_AT = 40, 10
#: Allocations until a plan, as a multiple of the earlier allocations.
TIMES = 4
MOST_MISSES = 0.1  # largest fraction of missed allocations
ROUNDS = 20  # of the planner
EVENTS = 4096


def iteration(seed: int, length: int, *, hands_on: bool = True) -> Iteration:
    """Draw buffers that are freed at once, at the end, or in the next iteration if allowed."""
    rng = random.Random(seed)
    events: list[tuple[float, Event]] = []
    for buffer in range(length):
        begin, size = rng.random(), rng.choice([600, 1000, 4096, 30_000, rng.randrange(600, 100_000)])
        end = begin + rng.choice([0.01, 0.1, rng.random(), 0.999])
        end = end if hands_on else min(end, 1 - 1e-9 * (buffer + 1))
        events.append((begin, Event(buffer, size)))
        events.append((end % 1, Event(buffer, age=int(end))))
    return [event for _, event in sorted(events)]


@dataclass(frozen=True)
class Loop:
    """The same iteration repeated until a plan is long overdue."""

    seed: int
    length: int


@dataclass(frozen=True)
class Noise:
    """Iterations without repetition."""

    seed: int
    allocations: int


@dataclass(frozen=True)
class Load:
    """Allocation of lasting buffers of one size or of many."""

    seed: int
    allocations: int
    sizes: int


@dataclass(frozen=True)
class Epochs:
    """Alternation between several runs of one iteration and several of another."""

    seed: int
    length: int
    turns: tuple[int, int]


Phase = Loop | Noise | Load | Epochs
seeds = st.integers(0, 1000)
phases = st.one_of(
    st.builds(Loop, seeds, st.integers(1, 60)),
    st.builds(Noise, seeds, st.integers(1, 6000)),
    st.builds(Load, seeds, st.integers(1, 3000), st.sampled_from([1, 2, 50])),
    st.builds(Epochs, seeds, st.integers(5, 40), st.tuples(st.integers(1, 6), st.integers(1, 3))),
)


class Program:
    """A program of phases, one after another."""

    def __init__(self, *, marks: bool, every: int) -> None:
        self.memory = Planning(marks=marks, every=every, events=EVENTS)
        self.marks, self.every = marks, every
        self.watcher = Watcher(self.memory)
        self.player = Player(self.watcher)

    def play(self, events: Iteration) -> int:
        """Play an iteration; return the misses."""
        before = len(self.watcher.hits)
        self.memory.mark()
        self.player.play(events)
        return self.watcher.hits[before:].count(False)

    def do(self, phase: Phase) -> None:
        before = len(self.watcher.hits)
        match phase:
            case Noise(seed, allocations):
                rng = random.Random(seed)
                for _ in range(allocations):
                    self.play([Event(0, rng.randrange(600, 1 << 20)), Event(0)])
            case Load(seed, allocations, sizes):
                rng = random.Random(seed)
                of = [rng.randrange(600, 10_000) for _ in range(sizes)]
                kept = [self.watcher.allocate(of[k % sizes]) for k in range(allocations)]
                del kept
            case Loop(seed, length):
                self.repeat([iteration(seed, length)], before)
            case Epochs(seed, length, turns):
                # With marks between them, each has a separate plan: no buffer passes from one to the other.
                one = iteration(seed, length, hands_on=not self.marks)
                other = iteration(seed + 1, length + 3, hands_on=not self.marks)
                self.repeat([*[one] * turns[0], *[other] * turns[1]], before)

    def repeat(self, together: list[Iteration], before: int) -> None:
        """Repeat an iteration; assert no misses in the end, or few with marks between alternating iterations.

        The last iteration predicts the next, so the wrong plan may be entered first.
        """
        enough = len(self.watcher.hits) + TIMES * before + ROUNDS * self.every
        for _ in range(SOON):
            for one in together:
                self.play(one)
        while len(self.watcher.hits) < enough:
            for one in together:
                self.play(one)
        begin = len(self.watcher.hits)
        misses = sum(self.play(one) for _ in range(LOOKED_AT) for one in together)
        allowed = MOST_MISSES * (len(self.watcher.hits) - begin) if self.marks and len(together) > 1 else 0
        note(f"{self.memory.client.state()} {self.memory.client.stats()['outcomes']}")
        assert misses <= allowed


@given(st.lists(phases, min_size=1, max_size=4), st.booleans(), st.sampled_from([7, 50, 400]))
@example([Epochs(1, 5, (3, 1)), Loop(1, 5)], False, 50)  # one miss in forty, for ever
def check_program(several: list[Phase], marks: bool, every: int) -> None:
    program = Program(marks=marks, every=every)
    for phase in several:
        program.do(phase)


@pytest.mark.parametrize("examples", [3, pytest.param(100, marks=pytest.mark.full)])
def test_repeated_iterations_are_planned_after_any_history(examples: int) -> None:
    settings(deadline=None, max_examples=examples)(check_program)()


@pytest.mark.parametrize(
    ("kept", "marks", "evaluates"), combinations([1, 6], [True, False], [True, False], every=3)
)
def test_buffers_kept_for_a_while_cost_no_hits_for_ever(marks: bool, kept: int, evaluates: bool) -> None:
    """A plan around kept buffers, or for their long lifetimes, gives way to a plan of present buffers."""
    program = Program(marks=marks, every=20)
    sizes = [80_000, 40_000, 120_000, 60_000, 20_000]
    always = [Event(k, size) for k, size in enumerate(sizes)] + [Event(k) for k in range(len(sizes))]
    for _ in range(60):
        program.play(always)
    arena = program.memory.core.stats()["arena_bytes"]
    for number in range(240):
        keeps = [Event(FOR_GOOD + number, 80_000), *always[1:5], *always[6:]]
        program.play(keeps if number % 8 == 0 else always)
        if number % 8 == 0 and number >= 8 * kept:
            oldest = min(key for key in program.player.live if key[1] >= FOR_GOOD)
            program.watcher.free(program.player.live.pop(oldest))
    program.player.free_all()
    for _ in range(30 if evaluates else 0):  # makes another plan the latest
        for one in (always, always, always, self_contained([3000, 5000, 7000])):
            program.play(one)
    for _ in range(12_000):
        program.play(always)
    program.memory.client.retire_unused_patterns()
    assert program.memory.client.stats()["outcomes"]["dynamic"] < 12_000
    assert program.memory.core.stats()["arena_bytes"] <= 1.05 * arena
    assert sum(program.play(always) for _ in range(20)) == 0


@pytest.mark.parametrize("values", [3, 40, 100_000])
@pytest.mark.parametrize("marks", [True, False])
def test_a_single_data_dependent_size_does_not_hide_the_iteration(marks: bool, values: int) -> None:
    """A mask or unique values, for example."""
    program, rng = Program(marks=marks, every=50), random.Random(values)
    always = iteration(5, 40)

    def one() -> int:
        place = 33
        size = rng.choice(range(20_000, 20_000 + 8 * values, 8))
        return program.play([*always[:place], Event(1000, size), Event(1000), *always[place:]])

    for _ in range(400 if values > 3 else 200):
        one()
    enveloped = marks and values > 3
    assert sum(one() for _ in range(50)) <= (0.2 if enveloped else 2) * 50
    # Of 400 sizes in random order ln(400) are larger than all before.
    assert program.memory.planner.registry.made <= (4 + math.log(400) if enveloped else 4)


def self_contained(sizes: list[int]) -> Iteration:
    return [Event(k, size) for k, size in enumerate(sizes)] + [Event(k) for k in range(len(sizes))]


def test_each_plan_may_come_to_need_longer_lifetimes() -> None:
    """Other plans may have needed longer lifetimes any number of times before."""
    program = Program(marks=True, every=20)
    for number in range(14):
        sizes = [20_000 * (k + 1) + 640 * number for k in range(5)]
        early = [*(Event(k, size) for k, size in enumerate(sizes[:3])), Event(1)]
        early += [*(Event(k, sizes[k]) for k in (3, 4)), *(Event(k) for k in (0, 2, 3, 4))]
        for _ in range(60):
            program.play(early)
        for _ in range(40):
            program.play(self_contained(sizes))
        assert sum(program.play(self_contained(sizes)) for _ in range(20)) == 0

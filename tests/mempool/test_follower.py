"""Hits lost by a departure from the plan; ``Core`` asserts that results never suffer."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cores import Core, pattern
from hypothesis import given
from hypothesis import strategies as st

from mempool._core import Mark

#: All different, so that every window is unique.
SIZES = [1000 + 700 * k for k in range(40)]


@pytest.fixture
def core() -> Core:
    made = Core()
    made.client.load(None, pattern(SIZES))
    return made


def in_thread(work: Callable[[], object]) -> None:
    """Run in a thread, and wait until its thread-local state is destroyed, which `join` does not."""
    thread = threading.Thread(target=work)
    thread.start()
    task = Path(f"/proc/self/task/{thread.native_id}")
    thread.join()
    while task.exists():
        time.sleep(0.001)


@given(place=st.integers(0, 39), gone=st.integers(1, 20), extra=st.lists(st.integers(513, 900), max_size=30))
def test_pool_realigns_within_two_windows_after_any_cut_and_insertion(
    place: int, gone: int, extra: list[int]
) -> None:
    core = Core()
    core.client.load(None, pattern(SIZES))
    assert core.run(SIZES) == 40
    rest = SIZES[place + gone :]
    core.run(SIZES[:place] + extra)
    for _ in range(2):  # nothing tells where an iteration begins
        core.run(rest)
        rest = SIZES
    assert core.run(SIZES) == 40


def test_evaluation_in_a_dynamic_scope_costs_no_hits(core: Core) -> None:
    for _ in range(3):
        core.step()
        assert core.run(SIZES[:20]) == 20
        core.client.enter_dynamic()
        assert core.run(SIZES[3:30]) == 0
        core.client.leave_dynamic()
        assert core.run(SIZES[20:]) == 20
    assert core.misses == 0


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize("other", [SIZES[:20] + [90_000 + 1000 * k for k in range(20)], SIZES[:25]])
def test_patterns_with_a_shared_prefix_switch_at_the_first_difference(marks: bool, other: list[int]) -> None:
    core = Core()
    core.client.load(None, pattern(SIZES))
    core.client.load(None, pattern(other))
    for sizes in [other, SIZES, other, SIZES, SIZES, other, other, SIZES, other, SIZES]:
        if marks:
            core.step()
        assert core.run(sizes) == len(sizes)
    assert core.misses == 0


def test_alternating_patterns_begin_with_the_predicted_successor() -> None:
    # Nothing is shared but the first size, and the two plans put it at different places.
    one, two = SIZES, [SIZES[0], *(size + 8 for size in SIZES[1:])]
    core = Core()
    core.client.load(None, pattern(one))
    core.client.load(None, pattern(two, [1 << 20, *(512 * 128 * k for k in range(1, 40))]))
    first = {}
    for number in range(8):
        core.step()
        sizes = (one, two)[number % 2]
        before = core.allocate(sizes[0])
        core.free(before)
        core.run(sizes[1:])
        first.setdefault(number % 2, []).append(before)
    assert len(set(first[0][2:])) == len(set(first[1][2:])) == 1
    assert first[0][-1] != first[1][-1]


def test_threads_swapping_their_work_lose_no_hits_with_marks() -> None:
    other = [size + 8 for size in SIZES]
    offsets = [(1 << 20) + 65536 * k for k in range(40)]
    core = Core(capacity=1 << 30)
    core.client.load(None, pattern(SIZES, others=[(1, 0, other, offsets)]))
    work = {"main": SIZES, "worker": other}
    turn = {"main": threading.Semaphore(0), "worker": threading.Semaphore(0)}
    done = threading.Semaphore(0)
    hits: list[int] = []

    def loop(name: str) -> None:
        for _ in range(6):
            turn[name].acquire()
            hits.append(core.run(work[name]))
            done.release()

    threads = [threading.Thread(target=loop, args=(name,)) for name in work]
    for thread in threads:
        thread.start()
    core.run([600])
    for _ in range(6):
        core.step()
        for name in work:
            turn[name].release()
            done.acquire()
        work["main"], work["worker"] = work["worker"], work["main"]
    for thread in threads:
        thread.join()
    assert hits[2:] == [40] * 10


@pytest.mark.parametrize("workers", [2, 4])
def test_threads_doing_equal_work_do_not_disturb_the_replaying_thread(workers: int) -> None:
    """Without marks, each a little behind the former thread, allocation by allocation."""
    core = Core()
    core.client.load(None, pattern(SIZES))
    together, alone = threading.Barrier(workers), threading.Lock()
    found: dict[int, dict[str, int]] = {}

    def loop(worker: int) -> None:
        counts = found.setdefault(worker, {})
        lag = 3 * worker
        kept: list[int] = []
        for step in range(8 * 40 + lag):
            together.wait()
            if step < lag:
                continue
            with alone:
                before = core.outcomes
                address = core.allocate(SIZES[(step - lag) % 40])
                for name, count in core.outcomes.items():
                    counts[name] = counts.get(name, 0) + count - before[name]
                kept.append(address)
                if len(kept) > 10:  # more than the lag, so that two threads in the same part conflict
                    core.free(kept.pop(0))
        together.abort()

    def iterate_until_one_ends(worker: int) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            loop(worker)

    threads = [threading.Thread(target=iterate_until_one_ends, args=(k,)) for k in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(counts["slot_occupied"] == 0 for counts in found.values()), found
    assert sum(counts["hit"] for counts in found.values()) >= 7 * 40


def test_new_thread_takes_over_the_sequence_of_an_ended_thread(core: Core) -> None:
    core.step()
    assert core.run(SIZES) == 40
    both = Core()
    other = [size + 8 for size in SIZES]
    both.client.load(None, pattern(SIZES, others=[(1, 0, other, [(1 << 20) + 65536 * k for k in range(40)])]))
    both.step()
    for _ in range(5):
        in_thread(lambda: both.run(other))
        both.run(SIZES)
        both.step()
    assert both.misses == 0
    assert both.client.state()["sequences"] == 2


def test_threads_agree_on_the_iteration_number() -> None:
    """Rotating addresses of two threads fit only if both count iterations alike."""
    core = Core()
    offsets = [[0, 1024], [2048, 3072]]
    made = pattern([600, 700], offsets, others=[(1, 0, [800, 900], [[1024, 0], [3072, 2048]])])
    core.client.load(None, made)
    for number in range(7):
        core.step()
        held = [core.allocate(600), core.allocate(700)]
        if number >= 3:  # the share of the other thread is free only in the same iteration's column
            in_thread(lambda: core.run([800, 900]))
        for address in held:
            core.free(address)
    assert core.misses == 0


def test_allocations_outside_an_iteration_wait_for_its_mark(core: Core) -> None:
    """Allocations after the last planned one or after the end; a repeated mark has no effect."""
    core.step()
    core.run(SIZES)
    assert core.run(SIZES) == 0
    assert core.outcomes["past_end"] == 40
    for marks, hits in (
        ([Mark.BEGIN, Mark.BEGIN], 40),
        ([Mark.END], 0),
        ([Mark.END, Mark.BEGIN], 40),
        ([Mark.STEP], 40),
    ):
        for mark in marks:
            core.client.mark(mark)
        assert core.run(SIZES) == hits


@pytest.mark.parametrize("left_out", [1, 3, 8])
def test_iteration_ending_early_is_over(left_out: int) -> None:
    """The same holds without marks; buffers of one iteration live on in the next."""
    core, places = Core(), 1 << 15
    sizes = SIZES[:30]
    # Each lives until the next iteration ends, which has places of its own.
    offsets = [[(2 * k + column) * places for column in range(2)] for k in range(30)]
    core.client.load(None, pattern(sizes, offsets))
    before: list[int] = []
    for number in range(40):
        ends_early = number % 4 == 3
        hits = core.client.stats()["outcomes"]["hit"]
        made = [core.allocate(size) for size in (sizes[:-left_out] if ends_early else sizes)]
        missed = len(made) - (core.client.stats()["outcomes"]["hit"] - hits)
        assert missed == (number % 4 == 0 and number > 0)
        for address in before:
            core.free(address)
        before = made
    assert core.client.state()["iterations"] >= 39


@given(
    sizes=st.lists(st.sampled_from([1000, 2000, 3000, 4000, 5000]), min_size=4, max_size=24),
    kept=st.lists(st.booleans(), min_size=24, max_size=24),
    flexible=st.lists(st.booleans(), min_size=24, max_size=24),
)
def test_core_answers_if_an_envelope_leads_through_as_the_follower_does(
    sizes: list[int], kept: list[bool], flexible: list[bool]
) -> None:
    least = [size - 400 * free for size, free in zip(sizes, flexible, strict=False)]
    asked = [size - 200 * free for size, stays, free in zip(sizes, kept, flexible, strict=False) if stays]
    envelope, core = pattern(sizes, least=least), Core()
    core.client.install(envelope)
    for _ in range(2):
        core.step()
        core.run(sizes)
    before = core.outcomes
    core.step()
    core.run(asked)
    missed = sum(core.outcomes[k] - before[k] for k in ("size_mismatch", "past_end", "desynchronized"))
    assert envelope.leads_through(0, np.array(asked, np.int64)) == (missed == 0)
    assert not envelope.leads_through(1, np.array(sizes, np.int64))

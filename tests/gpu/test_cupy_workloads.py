"""The programs that are measured under CuPy, over NumPy."""

from __future__ import annotations

import tracemalloc
from typing import Any

import cupy_events
import numpy as np
import pytest
from cupy_replay import Replay
from cupy_workloads import MOST_BYTES, WORKLOADS, budget_bytes
from sequences import Event

MIB = 1 << 20
BUDGET = 8 * MIB
ROOM = 64 * MIB


def _result(name: str, budget: int = BUDGET, steps: int = 3) -> str:
    workload = WORKLOADS[name].make(np, budget)
    for number in range(steps):
        workload.step(number)
    return workload.result()


@pytest.mark.parametrize("name", WORKLOADS)
def test_results_repeat_and_depend_on_every_step(name: str) -> None:
    assert _result(name) == _result(name)
    assert _result(name) != _result(name, steps=2)


@pytest.mark.parametrize("name", WORKLOADS)
def test_live_bytes_fit_the_budget(name: str) -> None:
    tracemalloc.start()
    try:
        _result(name, ROOM)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 1.25 * ROOM  # the lists of events are in it
    assert peak >= 0.5 * ROOM or name == "small training"


@pytest.mark.parametrize("name", [name for name in WORKLOADS if "training" not in name])
def test_all_steps_can_be_done(name: str) -> None:
    _result(name, MIB, WORKLOADS[name].steps)


def test_a_card_has_three_quarters_left() -> None:
    assert budget_bytes(8 << 30) == 2 << 30
    assert budget_bytes(140 << 30) == MOST_BYTES


def test_random_allocations_stay_below_their_most() -> None:
    steps = cupy_events.random_allocations(steps=10, events=200, most_bytes=1 << 30)
    events = [event for step in steps for event in step]
    assert [len(step) for step in steps] == [200] * 10
    assert 0.8 * (1 << 30) <= cupy_events.peak_load(events) <= 1 << 30
    sizes = [event.size for event in events if event.size]
    assert 1 << 16 <= min(sizes) < max(sizes) <= (1 << 30) // 4
    assert steps == cupy_events.random_allocations(steps=10, events=200, most_bytes=1 << 30)
    assert steps != cupy_events.random_allocations(steps=10, events=200, most_bytes=1 << 30, seed=1)


def test_a_trace_is_cut_at_its_marks_and_scaled() -> None:
    before, steps = cupy_events.generated(steps=5, most_bytes=100 * MIB)
    load = cupy_events.peak_load([*before, *(event for step in steps for event in step)])
    assert 0.99 * 100 * MIB <= load <= 100 * MIB
    assert all(event.size for event in before), "parameters stay"
    assert [event.size for event in steps[3]] == [event.size for event in steps[4]], "it repeats"


def test_recorded_iteration_repeats_once_its_oldest_buffers_exist() -> None:
    steps = cupy_events.recorded("gpt.train", steps=6, most_bytes=100 * MIB)
    shapes = [[event.size for event in step] for step in steps]
    assert shapes[3] == shapes[4] == shapes[5]
    assert 0.99 * 100 * MIB <= cupy_events.peak_load(e for step in steps for e in step) <= 100 * MIB


class Overlapping:
    """Arrays that all lie in the same place."""

    def __init__(self) -> None:
        self._place = np.zeros(1 << 16, np.uint8)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def empty(self, size: int, dtype: Any) -> Any:
        return self._place[100 : 100 + size]


def test_replay_detects_overlapping_buffers() -> None:
    events = [Event(1, 50_000), Event(2, 500), Event(1), Event(2)]
    results = []
    for xp in (np, Overlapping()):
        replay = Replay(xp, [], [events])
        replay.step(0)
        results.append(replay.result())
    assert results[0] != results[1]


def test_replay_drops_a_freed_buffer() -> None:
    replay = Replay(np, [Event(0, 10)], [[Event(1, 8 * MIB), Event(1), Event(2, 8 * MIB), Event(2)], []])
    tracemalloc.start()
    try:
        replay.step(0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 9 * MIB

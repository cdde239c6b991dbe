"""Buffers that grow or shrink: in place, by mapping their pages elsewhere, or by a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cores import Core, pattern

import mempool.numpy
from mempool.recording.events import EventConverter
from traces.buffers import buffers_of

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4 * KIB


def reallocate(core: Core, address: int, size: int, stream: int = 0) -> int:
    """Reallocate through the client, and tell the observer."""
    moved, foreign = core.client.reallocate(address, size, stream)
    assert not foreign
    if moved == 0:
        return 0
    del core.live[address]
    for other, length in core.live.items():
        assert moved + size <= other or other + length <= moved, "two live buffers overlap"
    core.live[moved] = size
    return moved


def books(core: Core) -> dict[str, Any]:
    stats: dict[str, Any] = core.client.stats()
    return stats


@pytest.mark.parametrize("page", [0, PAGE])
def test_buffer_grows_into_the_free_memory_behind(page: int) -> None:
    core = Core(page=page)
    buffer = core.allocate(10_000)
    for size in range(20_000, 250_000, 10_000):
        assert reallocate(core, buffer, size) == buffer
    assert books(core)["requested"] == {
        "current": 240_000,
        "peak": 240_000,
        "total": sum(range(10_000, 250_000, 10_000)),
    }
    assert core.pool.stats()["reserved"]["peak"] <= (MIB if page == 0 else 240_000 + page)
    core.give_everything_back()


@pytest.mark.parametrize(
    ("core", "size", "left", "following"),
    [(Core, 200_000, 50_176, 240_000), (lambda: Core(page=0), 64 * MIB, 2 * MIB, 50 * MIB)],
)
def test_memory_given_up_by_a_shrinking_buffer_merges_with_free_memory_at_once(
    core: Any, size: int, left: int, following: int
) -> None:
    core = core()
    buffer = core.allocate(size)
    assert reallocate(core, buffer, left - 100) == buffer
    assert books(core)["live"]["current"] == left  # a multiple of 512
    assert buffer + left <= core.allocate(following) < buffer + size  # 240,000: more than was given up
    core.give_everything_back()


def test_growing_segment_never_needs_a_second_segment() -> None:
    """The pages are mapped elsewhere: at no time is memory for two held, and nothing is copied."""
    core = Core(capacity=40 * MIB)
    buffer = core.allocate(MIB)
    for size in range(2 * MIB, 33 * MIB, MIB):
        buffer = reallocate(core, buffer, size)
        assert buffer != 0
    assert core.pool.stats()["reserved"]["peak"] == core.device.counts().peak_committed == 32 * MIB
    assert core.device.counts().resizes == 31
    assert not core.pool.owns(buffer - MIB)
    core.give_everything_back()


def test_idle_memory_is_returned_to_make_room_for_growth() -> None:
    """A copy would need both; the limit allows the buffer and the idle memory only."""
    core = Core()
    core.pool.set_retained_limit(1 << 40)
    buffer, other = core.allocate(60 * MIB), core.allocate(8 * MIB)
    core.free(other)
    core.pool.set_max_reserved(72 * MIB)
    assert reallocate(core, buffer, 70 * MIB) != 0
    core.give_everything_back()


def test_realloc_prefers_a_planned_slot() -> None:
    core = Core()
    core.client.load(None, pattern([10_000, 20_000, 30_000], [0, 10_240, -1]))
    base = core.allocate(10_000)
    assert [core.client.unplanned_bytes(size) for size in (19_999, 49_999, 60_000)] == [
        19_999,
        29_999,
        60_000,
    ]
    assert reallocate(core, base, 20_000) == base + 10_240
    assert core.hits == 2
    core.give_everything_back()


def test_growth_in_place_counts_as_an_allocation_for_the_plan() -> None:
    """The follower sees every realloc, wherever served, and so stays synchronized."""
    core = Core()
    core.client.load(None, pattern([10_000, 20_000, 30_000], [0, -1, 512 * 20]))
    core.allocate(10_000)
    stray = core.client.allocate(777, 1)
    core.live[stray] = 777
    core.client.enter_dynamic()
    other = core.allocate(5_000)
    core.client.leave_dynamic()
    assert core.client.unplanned_bytes(30_000) == 30_000  # all bytes are unplanned
    assert reallocate(core, other, 20_000) == other
    core.allocate(30_000)
    assert (core.hits, core.outcomes["dynamic"]) == (2, 1)
    core.give_everything_back()


@pytest.mark.parametrize(("old", "new"), [(5000, 9000), (9000, 5000), (300 * KIB, 400 * KIB)])
def test_new_buffer_is_recorded_before_the_end_of_the_old(old: int, new: int) -> None:
    """For the program both were alive, and a plan without slots for both would miss."""
    core = Core()
    core.client.set_recording(True)
    core.client.set_tracing(True)
    first = core.allocate(old)
    core.free(reallocate(core, first, new))
    packed, streams, _, whole = core.client.recording()
    assert whole
    recording = EventConverter(512)
    for trace in (
        recording.convert_brief(packed, streams),
        EventConverter(512).trace(core.client.take_trace()),
    ):
        trace.validate()
        assert trace.size.tolist() == [old, new, 0, 0]
        assert trace.kind.tolist() == [0, 0, 1, 1]
        assert trace.buffer.tolist() == [0, 1, 0, 1]
        assert (np.diff(trace.time_ns) >= 0).all()
        assert buffers_of(trace).end.tolist() == [2, 3]
    core.give_everything_back()


def test_growing_array_is_whole_and_never_held_twice() -> None:
    step = 1 << 18  # elements, 2 MiB
    with mempool.numpy.install() as pool:
        array = np.arange(step, dtype=np.float64)
        for i in range(1, 60):
            array.resize((i + 1) * step, refcheck=False)
            array[i * step :] = np.arange(i * step, (i + 1) * step)
        assert pool.report().values["reserved_peak_bytes"] < 1.2 * array.nbytes
        assert (array == np.arange(60 * step)).all()
        array.resize(40 * step, refcheck=False)
        assert (array == np.arange(40 * step)).all()

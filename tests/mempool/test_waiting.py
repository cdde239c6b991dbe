"""Conditions that end a planner's wait; each end of a wait takes a turn of the interpreter's lock."""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import programs
import pytest
from pools import run, simulated

from mempool import Pool, _core

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def test_wait_ends_at_a_number_of_allocations_or_unrecorded_misses() -> None:
    with recording() as pool:
        waiting = Waiting(pool.client, search_seconds=LONG, allocations=1000)
        never_the_same(pool, 999)
        assert not waiting.is_over()
        never_the_same(pool, 1)
        assert not waiting.news()
        waiting = Waiting(pool.client, search_seconds=LONG, misses=1000)
        never_the_same(pool, 1200)
        assert not waiting.is_over()
        pool.client.set_recording(False)
        assert not waiting.news()


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

"""Pools that are installed and closed at any time, and a pool that runs for very long."""

from __future__ import annotations

import gc
import importlib
import random
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from policies import Planning
from pools import simulated
from sequences import Event, Player

import mempool.numpy
from mempool import OutOfMemoryError, Pool, _core

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def test_reloaded_adapter_serves_and_releases_the_former_state() -> None:
    for _ in range(5):
        with mempool.numpy.install(background=False) as pool:
            array = np.arange(5000)
            importlib.reload(mempool.numpy)
            grown = np.concatenate([array, np.arange(5000)])
            assert pool.report().to_dict()["requested_bytes"] >= grown.nbytes
            array.resize(50_000, refcheck=False)
        assert int(array.sum()) == int(np.arange(5000).sum())
        del array, grown


@pytest.fixture
def frugal() -> Iterator[_core.SimulatedDevice]:
    device = simulated()
    yield device
    assert device.counts().live_reservations == 0
    assert device.counts().committed == 0


@pytest.mark.parametrize("lasts", [1, 5, 16])
def test_failure_of_any_device_call_loses_nothing(frugal: _core.SimulatedDevice, lasts: int) -> None:
    """All calls fail from one on, for some iterations of recording, planning and replay; then none fails."""
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
        if refused == 0:  # as many as there are
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

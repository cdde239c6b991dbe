"""CuPy's buffers freed in other threads, garbage collections, forked children, and at the end of Python."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import FakeCuda

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cores import pattern  # noqa: E402
from cupy_platform import Current, FakePlatform, install, make  # noqa: E402
from fake_cuda import ticking  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from pools import simulated  # noqa: E402

from mempool import OutOfMemoryError  # noqa: E402

SUPPORT = Path(__file__).parents[1] / "support"
KIB, MIB = 1 << 10, 1 << 20
#: Times that a stream is given an address between two waits for the device, at least.
RARELY = 1024


class Model:
    """Reference model of a pool, by a list: no two live buffers of a device overlap."""

    def __init__(self) -> None:
        self.spans: dict[int, tuple[int, int, int]] = {}  # number: device, address, size
        self.views: dict[int, list[Any]] = {}
        self._numbers = 0

    def add(self, device: int, pointer: Any, size: int) -> None:
        assert (pointer.device_id, pointer.mem.size) == (device, size)
        for other, address, length in self.spans.values():
            apart = pointer.ptr + size <= address or address + length <= pointer.ptr
            assert other != device or apart, "two live buffers overlap"
        self._numbers += 1
        self.spans[self._numbers] = device, pointer.ptr, size
        self.views[self._numbers] = [pointer]

    def view(self, choice: int, again: int) -> None:
        views = self.views[self._one(choice)]
        views.append(views[-1] + 0 if again % 2 else cupy.ndarray((1,), "u1", memptr=views[0]).data)

    def drop(self, choice: int, *, elsewhere: bool = False) -> None:
        """Drop the last view of an array, here or in another thread."""
        number = self._one(choice)
        del self.spans[number]
        views = self.views.pop(number)
        if elsewhere:
            thread = threading.Thread(target=views.clear)
            thread.start()
            thread.join()

    def used(self, device: int) -> int:
        return sum(size for on, _, size in self.spans.values() if on == device)

    def _one(self, choice: int) -> int:
        return sorted(self.views)[choice % len(self.views)]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), st.integers(0, 1), st.sampled_from([0, 4096, 8192, 2])),
        st.tuples(st.just("view"), st.integers(0, 99), st.integers(0, 500)),
        st.tuples(st.just("drop"), st.integers(0, 99), st.booleans()),
        st.tuples(st.just("round"), st.integers(0, 1), st.integers(1, 4)),
        st.tuples(st.just("trim"), st.integers(0, 1), st.just(0)),
    ),
    max_size=60,
)


class Player:
    """Play drawn steps on a pool with two devices and on the model."""

    def __init__(self, current: Current, sizes: list[int]) -> None:
        self.pool = make(FakePlatform(current, lambda _: simulated(capacity=4 * MIB)))
        self.model, self.current, self.sizes = Model(), current, sizes

    def alloc(self, device: int, stream: int, size: int = 0) -> None:
        size = size or self.sizes[stream % 5] * (8 if len(self.model.views) % 7 == 0 else 1)
        with self.current.on(device, stream):
            try:
                self.model.add(device, self.pool.malloc(size), size)
            except OutOfMemoryError:
                assert self.model.used(device) > MIB

    def view(self, choice: int, again: int) -> None:
        if self.model.views:
            self.model.view(choice, again)

    def drop(self, choice: int, elsewhere: int) -> None:
        if self.model.views:
            self.model.drop(choice, elsewhere=bool(elsewhere))

    def round(self, device: int, count: int) -> None:
        self.pool.step()
        for size in self.sizes[:count]:
            self.alloc(device, 0, size)
        for _ in range(count):
            self.drop(-1, 0)
        self.pool.plan_now()

    def trim(self, device: int, _: int) -> None:
        with self.current.on(device):
            self.pool.free_all_blocks()


@given(ACTIONS, st.lists(st.integers(1, 60_000), min_size=5, max_size=5))
@settings(max_examples=100)
def test_against_a_naive_model(
    current_library: Path, actions: list[tuple[str, int, int]], sizes: list[int]
) -> None:
    """With devices, streams, views and frees in other threads in any order, live buffers are disjoint."""
    player = Player(Current(current_library), sizes)
    for action, *arguments in actions:
        getattr(player, action)(*arguments)
    pools = player.pool.pools
    for device, one in pools.items():
        assert one.report().to_dict()["requested_bytes"] == player.model.used(device)
    player.model.views.clear()
    assert [one.core.stats()["live_blocks"] for one in pools.values()] == [0] * len(pools)
    player.pool.close()


def test_waiting_for_the_device_releases_the_interpreter_lock(current: Current, fake: FakeCuda) -> None:
    """A function queued on a stream may need the interpreter before the wait can end."""
    fake.set_capacity(20 * MIB)
    fake.slow("cuCtxSynchronize", 500)
    with install(FakePlatform(current, fake.device)) as pool:
        with current.on(stream=fake.stream()):
            cupy.ndarray((12 * MIB,), "u1")
        with ticking() as ticks:
            array = cupy.ndarray((12 * MIB,), "u1")  # only after all streams were waited for
            assert len(ticks) >= 5
        assert array.data.ptr != 0
        assert pool.used_bytes() == 12 * MIB


def test_wait_for_a_planned_address_releases_the_interpreter_lock(current: Current, fake: FakeCuda) -> None:
    """Two streams have the same slot in turn; the second has to wait for all work queued on the first."""
    side = fake.stream()
    with install(FakePlatform(current, fake.device)) as pool, ThreadPoolExecutor(1) as beside:
        client = pool.pool(0).client
        client.load(None, pattern([MIB], [0], others=[(1, side, [MIB, MIB], [MIB, 0])]))
        client.set_recording(False)  # so that hits go the straight way

        def one(stream: int) -> int:
            with current.on(stream=stream):
                return int(cupy.ndarray((MIB,), "u1").data.ptr)

        assert one(0) == one(0)
        pool.step()
        place = one(0)  # the other thread's last stream is always its own, as on the straight way
        assert beside.submit(one, side).result() == place + MIB
        for _ in range(RARELY):
            pool.step()
            assert one(0) == place
        assert beside.submit(one, side).result() == place + MIB
        fake.slow("cuCtxSynchronize", 300)
        before = fake.calls("cuCtxSynchronize")
        with ticking() as ticks:
            assert beside.submit(one, side).result() == place
            assert len(ticks) >= 5
        assert fake.calls("cuCtxSynchronize") == before + 1


def test_last_array_of_a_closed_pool_ends_the_pool_without_the_interpreter_lock(
    current: Current, fake: FakeCuda
) -> None:
    with install(FakePlatform(current, fake.device)) as pool:
        arrays = [cupy.ndarray((12 * MIB,), "u1")]
    del pool
    gc.collect()
    fake.slow("cuCtxSynchronize", 300)
    before = fake.calls("cuCtxSynchronize")
    with ticking() as ticks:
        arrays.clear()
        assert len(ticks) >= 5
    assert fake.calls("cuCtxSynchronize") > before
    assert fake.live_allocations == 0


def test_free_waiting_for_the_pool_lock_releases_the_interpreter_lock(
    current: Current, fake: FakeCuda
) -> None:
    fake.set_capacity(20 * MIB)
    with install(FakePlatform(current, fake.device)):
        with current.on(stream=fake.stream()):
            cupy.ndarray((12 * MIB,), "u1")
        small = [cupy.ndarray((100,), "u1")]
        fake.slow("cuCtxSynchronize", 500)
        waits = threading.Thread(target=cupy.ndarray, args=((12 * MIB,), "u1"))
        waits.start()
        time.sleep(0.1)  # the pool's lock is held by the thread that waits for the device
        with ticking() as ticks:
            small.clear()
            assert len(ticks) >= 5
        waits.join()


def in_a_process(current_library: Path, program: str) -> str:
    """Run code in a process; return its output after asserting success and an empty stderr."""
    head = f"""
    import gc, os, sys, threading
    import cupy
    from cupy_platform import Current, FakePlatform, install, make
    from pools import simulated
    from mempool import _core
    current = Current({str(current_library)!r})
    platform = FakePlatform(current, lambda _: simulated())
    """
    places = [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(head) + textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("close", ["", "pool.close()", "del pool", "pool.close(); del pool; gc.collect()"])
def test_arrays_may_live_until_the_interpreter_ends(
    current_library: Path, close: str, background: bool
) -> None:
    """The arrays are in modules, in cycles, in a running thread, and in an object that ends last of all."""
    said = in_a_process(
        current_library,
        f"""
        pool = install(platform, background={background})
        for _ in range(8):
            pool.step()
            kept = [cupy.ndarray((1000 * k,), "f4") for k in range(1, 5)]
            if not {background}:
                pool.plan_now()
        class Cycle: pass
        cycle = Cycle(); cycle.me = cycle; cycle.array = cupy.ndarray((5000,), "f4")
        sys.kept = cupy.ndarray((6000,), "f4")
        cupy.kept = cupy.ndarray((7000,), "f4")
        class Last:
            def __del__(self, allocate=pool.malloc): self.array = allocate(1000)
        sys.last = Last()
        begun = threading.Event()
        def work(allocate=pool.malloc):
            mine = cupy.ndarray((1000,), "f4")
            while True:
                mine = allocate(4000)
                begun.set()
        threading.Thread(target=work, daemon=True).start()
        begun.wait()
        {close}
        print("end")
        """,
    )
    assert said == "end\n"


def test_child_forked_while_another_thread_holds_the_locks_goes_on(current_library: Path) -> None:
    said = in_a_process(
        current_library,
        """
        import signal
        from mempool.cupy import captures
        pool = install(platform, background=False)
        kept = cupy.ndarray((1000,), "f4")
        held, over = threading.Event(), threading.Event()

        def hold():
            with pool._lock, captures._lock, pool.pool(0)._lock:
                held.set()
                over.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(120)
            pool.step()
            pool.release_graphs()
            with pool.iteration():
                del kept
                more = cupy.ndarray((1000,), "f4")
            del more
            pool.close()
            os._exit(pool.pool(0).core.stats()["live_blocks"])
        assert os.waitpid(child, 0)[1] == 0
        over.set()
        thread.join()
        pool.close()
        print("well")
        """,
    )
    assert said == "well\n"

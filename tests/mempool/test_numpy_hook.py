"""NumPy's default handler changed in place.

The pool serves every thread, and frees go to the allocating functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempool import _core

MIB = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def _warm_up() -> None:
    """Call functions whose first use makes NumPy or pytest keep arrays, which must not be in a pool."""
    np.testing.assert_array_equal(numbers(3), numbers(3))
    gc.collect()


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[_core.Pool]:
    """Serve NumPy with a pool without a planner."""
    pool = _core.Pool(device=_core.HostDevice(), **options)
    client = _core.Client(pool, "numpy")
    _core.numpy_hook().serve(client)
    try:
        yield pool
    finally:
        _core.numpy_hook().stop()


@pytest.fixture
def held() -> Callable[[], int]:
    """Return the number of pools held by arrays of this test; libraries keep arrays from earlier pools."""
    gc.collect()
    before = _core.numpy_hook().held()
    return lambda: _core.numpy_hook().held() - before


def owns(pool: _core.Pool, array: np.ndarray[Any, Any]) -> bool:
    return bool(pool.owns(array.ctypes.data))


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:  # noqa: PTH123
        return int(statm.read().split()[1]) * 4096


def numbers(size: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 1 << 60, size)


class TestEveryThread:
    def make(self) -> np.ndarray[Any, Any]:
        return np.arange(1000.0) + 1

    def test_pool_serves_small_arrays_and_scalars_of_this_thread(self) -> None:
        with serving() as pool:
            assert owns(pool, self.make())
            assert owns(pool, np.zeros(3))
            assert owns(pool, np.array("text"))

    def test_pool_serves_a_new_thread_with_an_empty_context(self) -> None:
        with serving() as pool, ThreadPoolExecutor(4) as threads:
            assert all(threads.map(lambda _: owns(pool, self.make()), range(16)))

    def test_pool_serves_a_thread_not_started_by_python(self) -> None:
        seen = []
        kept = []
        libc = ctypes.CDLL(None)
        thread = ctypes.c_ulong()
        with serving() as pool:

            @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
            def body(_: int | None) -> None:
                kept.append(self.make())
                seen.append(owns(pool, kept[0]))

            assert libc.pthread_create(ctypes.byref(thread), None, body, None) == 0
            assert libc.pthread_join(thread, None) == 0
        assert seen == [True]
        assert kept[0].sum() == 500500


class TestForeignAddresses:
    @pytest.mark.parametrize("size", [3, 1000, 300_000])
    def test_array_outlives_its_pool_and_is_resized_and_freed_afterwards(
        self, held: Callable[[], int], size: int
    ) -> None:
        with serving() as pool:
            array, other = numbers(size), numbers(size)
        expected = numbers(size)
        assert owns(pool, array)
        array.resize(2 * size, refcheck=False)
        assert not owns(pool, array)
        np.testing.assert_array_equal(array[:size], expected)
        np.testing.assert_array_equal(other, expected)
        other.resize(max(size // 2, 1), refcheck=False)
        np.testing.assert_array_equal(other, expected[: max(size // 2, 1)])
        del array, other
        assert held() == 0

    def test_bypassing_thread_frees_and_resizes_arrays_of_the_pool(self) -> None:
        results = []

        def work(array: np.ndarray[Any, Any]) -> None:
            with _core.Bypass():
                array.resize(4000, refcheck=False)
                results.append((owns(pool, np.ones(1000)), owns(pool, array), array[:1000].copy()))

        with serving() as pool:
            thread = threading.Thread(target=work, args=(numbers(1000),))
            thread.start()
            thread.join()
        assert results[0][:2] == (False, False)
        np.testing.assert_array_equal(results[0][2], numbers(1000))


class TestZeros:
    @pytest.mark.parametrize("size", [1, 60, 513, 5000, 300_000, 10_000_000])
    def test_zeros_are_zero_in_reused_memory(self, size: int) -> None:
        with serving() as pool:
            pool.set_retained_limit(1 << 30)
            anchor = np.ones(size)
            for _ in range(3):
                dirty = np.full(size, np.nan)
                del dirty
                assert not np.zeros(size).any()
                assert not np.zeros((size, 1), "f4").any()
            assert anchor.all()

    def test_many_gigabytes_of_zeros_touched_sparsely_stay_small(self) -> None:
        with serving() as pool:
            before = resident_bytes()
            zeros = np.zeros(12 << 30, np.uint8)
            zeros[:: 64 * MIB] = 1
            assert owns(pool, zeros)
            assert int(zeros[:: 32 * MIB].sum()) == 192
            assert resident_bytes() - before < 8 * MIB
            del zeros

    def test_large_zeros_in_reused_memory_take_no_pages_until_touched(self) -> None:
        with serving() as pool:
            pool.set_retained_limit(1 << 30)
            del_me = np.ones(256 * MIB, np.uint8)
            del del_me
            before = resident_bytes()
            zeros = np.zeros(256 * MIB, np.uint8)
            assert resident_bytes() - before < 8 * MIB
            assert not zeros[::4096].any()


class TestMemoryError:
    def test_failed_resize_leaves_the_old_array_unchanged(self) -> None:
        with serving(max_reserved=64 * MIB):
            array = numbers(1 * MIB)
            with pytest.raises(MemoryError):
                array.resize(100 * MIB, refcheck=False)
            np.testing.assert_array_equal(array, numbers(1 * MIB))
            array.resize(2 * MIB, refcheck=False)
            np.testing.assert_array_equal(array[: 1 * MIB], numbers(1 * MIB))


class TestManyTimes:
    def test_second_client_is_refused_while_the_first_serves(self) -> None:
        with serving(), pytest.raises(RuntimeError, match="another client"), serving():
            pass
        _core.numpy_hook().stop()
        assert not _core.numpy_hook().serving()


def test_arrays_in_cycles_are_freed_by_a_collection_inside_an_allocation() -> None:
    class Node:
        def __init__(self) -> None:
            self.me = self
            self.array = np.full(400, 7.0)

    old = gc.get_threshold()
    gc.set_threshold(5, 2, 2)
    try:
        with serving() as pool:
            for _ in range(2000):
                node = Node()
                assert (node.array == 7).all()
            del node
            gc.collect()
            assert pool.stats()["live_blocks"] <= 8
    finally:
        gc.set_threshold(*old)


@pytest.mark.parametrize(
    "call",
    ["pool.core.stats", "client.stats", "client.state", "client.divergences", "client.recording",
     "client.find_recurrence", "client.take_trace", "pool.core.arena_ranges", "pool.report", "pool.explain",
     "snapshot", "usage"],
)  # fmt: skip
def test_no_garbage_is_collected_under_the_lock(call: str) -> None:
    """Until Python 3.12 the creation of a dict may free arrays in cycles."""
    script = f"""
import faulthandler, gc
import numpy as np, mempool.numpy
from mempool import _core
faulthandler.dump_traceback_later(20, exit=True)
pool = mempool.numpy.install(background=False)
client = pool.client
pool.report(), pool.explain()
_core.set_history(client, 100)
snapshot, usage = lambda: _core.snapshot(pool.core, client), lambda: _core.usage(pool.core)
class Node: pass
def garbage():
    for _ in range(50):
        node = Node()
        node.me, node.array = node, np.ones(5000)
call, kept = {call}, []
gc.disable()
for number in range(60):  # the first to the sixtieth object that the call makes
    garbage()
    kept += [{{}} for _ in range(300)]  # none is left to be used again
    gc.set_threshold(gc.get_count()[0] + number, 1000, 1000)
    gc.enable()
    call()
    gc.disable()
print("well")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr


def _grow(array: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    array.resize(size, refcheck=False)
    return array


OPERATIONS: dict[str, Callable[[np.ndarray[Any, Any], int], np.ndarray[Any, Any]]] = {
    "resize": _grow,
    "zeros": lambda _, n: np.zeros(n),
    "copy": lambda a, _: a.copy(),
    "tile": lambda a, n: np.tile(a, 1 + n % 3)[:70_000],
    "sum": lambda a, _: a.sum(keepdims=True),
    "sort": lambda a, _: np.sort(a),
    "text": lambda a, _: a[:9].astype(str).astype(float),
    "iterate": lambda a, _: np.fromiter((x + 1 for x in a[:3000]), float),
    "reverse": lambda a, n: np.concatenate([a[::-1][:30_000], np.arange(n % 50)]),
    "objects": lambda a, _: np.array([a[:2], None], object)[0],
    "save": lambda a, _: np.frombuffer(bytearray(a.tobytes())).copy(),
}


@given(
    st.lists(
        st.tuples(st.sampled_from([*OPERATIONS, "serve", "stop"]), st.integers(0, 5), st.integers(0, 60_000)),
        max_size=40,
    )
)
def test_any_sequence_of_operations_gives_the_same_with_and_without_a_pool(
    steps: list[tuple[str, int, int]],
) -> None:

    def run(*, with_pools: bool) -> list[bytes]:
        slots = [np.arange(n) * 1.5 for n in (1, 10, 63, 64, 1000, 40_000)]
        with contextlib.ExitStack() as stack:
            for name, slot, size in steps:
                if name in OPERATIONS:
                    result = OPERATIONS[name](slots[slot], size)
                    slots[slot] = result if result.flags.owndata else result.copy()
                elif with_pools:
                    stack.close()
                    if name == "serve":
                        stack.enter_context(serving())
        return [a.tobytes() for a in slots]

    assert run(with_pools=True) == run(with_pools=False)

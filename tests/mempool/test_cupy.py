"""CuPy's arrays in a pool, on addresses without memory: see tests/support/cupy_platform.py."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cupy_platform import Current, FakePlatform, capsule, install, make  # noqa: E402
from fake_cuda import on_another_thread  # noqa: E402
from pools import simulated  # noqa: E402

import mempool.cupy  # noqa: E402
from mempool import OutOfMemoryError, UsageError, _core  # noqa: E402
from mempool.cupy.platform import Cuda  # noqa: E402
from traces.formats.parquet import read_trace  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from answers import Cli
    from fake_cuda import FakeCuda

    from mempool.cupy import CupyPool

MIB = 1 << 20


@pytest.fixture(autouse=True)
def cupy_is_as_before() -> Iterator[None]:
    before = cupy.cuda.get_allocator(), cupy.get_default_memory_pool(), dict(cupy.cuda.Stream.__dict__)
    yield
    assert not mempool.cupy.is_installed()
    assert cupy.cuda.get_allocator() == before[0]
    assert cupy.get_default_memory_pool() is before[1]
    assert dict(cupy.cuda.Stream.__dict__) == before[2]


@pytest.fixture
def platform(current: Current) -> FakePlatform:
    return FakePlatform(current, lambda _: simulated())


@pytest.fixture
def pool(platform: FakePlatform) -> Iterator[CupyPool]:
    with install(platform) as made:
        yield made


def train(pool: CupyPool, iterations: int = 8, *, step: bool = True) -> None:
    for _ in range(iterations):
        if step:
            pool.step()
        first = cupy.ndarray((10_000,), "f4")
        second = cupy.ndarray((20_000,), "f4")
        del first
        third = cupy.ndarray((30_000,), "f4")
        del second, third
        pool.plan_now()


# --- arrays


def test_array_owns_its_requested_bytes_and_returns_them(pool: CupyPool) -> None:
    array = cupy.ndarray((1000,), "f4")
    assert array.data.ptr == array.data.mem.ptr != 0
    assert (array.data.mem.size, array.data.device_id) == (4000, 0)
    assert pool.pool(0).core.owns(array.data.ptr)
    assert pool.report().to_dict()["requested_bytes"] == 4000
    del array
    assert pool.report().to_dict()["requested_bytes"] == 0


def test_no_bytes_are_no_buffer(pool: CupyPool) -> None:
    for made in (cupy.ndarray((0, 5), "f4").data, pool.malloc(0), cupy.cuda.alloc(0)):
        assert (made.ptr, made.mem.size, made.device_id) == (0, 0, 0)
        assert (made + 0).ptr == 0
    assert pool.pools == {}


@pytest.mark.parametrize("step", [True, False])
def test_arrays_are_replayed_with_marks_and_without(pool: CupyPool, step: bool) -> None:
    train(pool, 60, step=step)
    report = pool.report().to_dict()
    assert pool.state == report["state"] == "replaying"
    assert report["hit_rate"] == 1.0
    assert report["coverage"] == 1.0
    assert report["name"] == "cupy"


def test_invalid_sizes_are_refused(pool: CupyPool) -> None:
    with pytest.raises(ValueError, match="size -1 is negative"):
        pool.malloc(-1)
    with pytest.raises(OverflowError):
        pool.malloc(1 << 70)
    for bad in ("12", 1.5, None):
        with pytest.raises(TypeError):
            pool.malloc(bad)
    for arguments, options in (((), {}), ((1, 2), {}), ((), {"size": 4})):
        with pytest.raises(TypeError, match="one argument"):
            pool.malloc(*arguments, **options)
    assert cupy.ndarray((10,), "f4").data.ptr != 0


# --- what is current


def test_each_device_has_a_pool_of_its_own(pool: CupyPool, platform: FakePlatform, current: Current) -> None:
    train(pool)
    with current.on(device=2):
        train(pool)
        there = cupy.ndarray((1000,), "f4")
        assert there.data.device_id == 2
        assert pool.pool(2).core.owns(there.data.ptr)
        assert pool.used_bytes() == 4032
    assert pool.used_bytes() == 0
    assert sorted(platform.devices) == [0, 2]
    assert [one.name for one in pool.pools.values()] == ["cupy", "cupy:2"]
    assert pool.plans == 2
    report = pool.report()
    assert sorted(report.values["devices"]) == ["0", "2"]
    assert report.values["allocations"] == 8 * 3 * 2 + 1
    assert "mempool: cupy:2" in str(report)
    assert "device 2: hits" in report._repr_html_()
    del there  # with another device current
    assert pool.pool(2).client.stats()["live"]["current"] == 0


def test_array_uses_the_current_stream_at_allocation_and_at_free(current: Current, fake: FakeCuda) -> None:
    """Memory free on one stream does not serve another."""
    with install(FakePlatform(current, fake.device)) as pool:
        with current.on(stream=4096):
            array = cupy.ndarray((1000,), "f4")
            freed = array.data.ptr
        del array
        on_the_default = cupy.ndarray((1000,), "f4")
        assert on_the_default.data.ptr != freed
        with current.on(stream=4096):
            assert cupy.ndarray((1000,), "f4").data.ptr == freed
        assert pool.malloc.current() == (0, 0)
        freed = on_the_default.data.ptr
        del on_the_default
        with current.on(stream=1):  # the other handle of the legacy default stream
            assert cupy.ndarray((1000,), "f4").data.ptr == freed


def test_per_thread_default_stream_differs_between_threads(current: Current, fake: FakeCuda) -> None:
    def freed() -> tuple[int, int]:
        with current.on(stream=2):
            return pool.malloc.current()[1], cupy.ndarray((1000,), "f4").data.ptr

    with install(FakePlatform(current, fake.device)) as pool:
        mine, where = freed()
        assert (mine, where) == freed()
        assert mine == _core.thread_stream() < 0
        with ThreadPoolExecutor(1) as threads:
            its, there = threads.submit(freed).result()
        assert its not in (mine, 0, 2)
        assert there != where


def test_functions_in_python_do_as_well(current: Current) -> None:
    with install(FakePlatform(current, lambda _: simulated(), python=True)) as pool, current.on(1, 4096):
        assert pool.malloc.current() == (1, 4096)
        assert cupy.ndarray((10,), "f4").data.device_id == 1


def test_cupy_errors_pass_through(pool: CupyPool) -> None:
    def fail() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver")

    class Failing:
        def check(self) -> None: ...
        def device(self, index: int) -> _core.Device:
            raise AssertionError

        def current(self) -> tuple[Any, Any]:
            return fail, fail

    broken = make(Failing())  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="cudaErrorInsufficientDriver"):
        broken.malloc(100)
    with pytest.raises(RuntimeError, match="cudaErrorInsufficientDriver"):
        broken.malloc(0)
    broken.close()


def test_only_c_functions_of_the_known_types_are_called_in_c() -> None:
    assert all(_core.cupy_knows(function) for function in Cuda().current())
    assert not _core.cupy_knows(capsule(1, b"int (PyObject *)"))
    assert not _core.cupy_knows(len)


# --- several devices


def test_plans_are_saved_and_loaded_for_each_device(
    platform: FakePlatform, current: Current, tmp_path: Path
) -> None:
    path = tmp_path / "run.plan"
    with install(platform) as pool:
        with pytest.raises(UsageError, match="no plan yet"):
            pool.save(path)
        train(pool)
        with current.on(device=1):
            train(pool)
        pool.save(path)
        each, joint = [one.metrics() for one in pool.pools.values()], pool.metrics()
        assert joint["steps"] == max(metrics["steps"] for metrics in each)
        assert joint["reserved_bytes"] == each[0]["reserved_bytes"] + each[1]["reserved_bytes"]
        assert joint["hit_rate"] == 1
        assert (
            {"metrics", "step", "free_all_blocks"}
            < set(dir(pool))
            < {*dir(type(pool)), "name", "malloc", "settings"}
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.device1.plan", "run.plan"]
    with install(platform, plan=str(path)) as pool:
        for device in (1, 0):
            with current.on(device=device):
                train(pool, 1, step=False)
        assert {i: one.report().to_dict()["hits_total"] for i, one in pool.pools.items()} == {0: 3, 1: 3}


def test_traces_are_written_for_each_device(platform: FakePlatform, current: Current, tmp_path: Path) -> None:
    path = tmp_path / "run.trace"
    with install(platform, record=str(path)) as pool:
        train(pool, 2)
        with current.on(device=1):
            train(pool, 1)
    assert len(read_trace(path).size) > len(read_trace(tmp_path / "run.device1.trace").size) > 0


def test_scopes_apply_to_a_device_first_used_within(pool: CupyPool, current: Current) -> None:
    with pool.dynamic():
        for device in (0, 1):
            with current.on(device=device):
                cupy.ndarray((1000,), "f4")
    with current.on(device=1):
        assert pool.pool(1).client.stats()["outcomes"]["out_of_iteration"] == 1
        cupy.ndarray((1000,), "f4")
        assert pool.pool(1).client.stats()["outcomes"]["out_of_iteration"] == 1
    with pool.iteration():
        with current.on(device=2):
            cupy.ndarray((1000,), "f4")
        with pytest.raises(UsageError, match="inside an iteration"), pool.iteration():
            pass
        with pytest.raises(UsageError, match=r"step\(\) inside iteration"):
            pool.step()
    assert [one.client.state()["marks"] for one in pool.pools.values()] == [1, 1, 1]
    pool.step()


# --- statistics


def test_numbers_by_cupys_names(pool: CupyPool) -> None:
    mine = cupy.get_default_memory_pool()
    assert mine is pool
    assert (mine.used_bytes(), mine.free_bytes(), mine.total_bytes(), mine.n_free_blocks()) == (0, 0, 0, 0)
    first, second = cupy.ndarray((MIB,), "u1"), cupy.ndarray((MIB,), "u1")
    assert (mine.used_bytes(), mine.free_bytes()) == (2 * MIB, 0)
    del first
    held = mine.total_bytes()
    assert mine.used_bytes() == MIB
    assert mine.free_bytes() == held - MIB
    mine.free_all_blocks()
    mine.free_all_blocks(stream=cupy.cuda.Stream.null)
    assert mine.total_bytes() == MIB
    assert mine.free_bytes() == 0
    del second


def test_limits_are_cupys(current: Current, fake: FakeCuda) -> None:
    fake.set_capacity(64 * MIB)
    with install(FakePlatform(current, fake.device)) as pool:
        assert pool.get_limit() == 0
        pool.set_limit(size=24 * MIB)
        assert pool.get_limit() == 24 * MIB
        first = cupy.ndarray((16 * MIB,), "u1")
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match=f"limited to {24 * MIB:,}"):
            cupy.ndarray((16 * MIB,), "u1")
        with current.on(device=1):
            assert pool.get_limit() == 0
        pool.set_limit(fraction=0.5)
        assert pool.get_limit() == 32 * MIB
        pool.set_limit()
        assert pool.get_limit() == 0
        second = cupy.ndarray((16 * MIB,), "u1")
        del first, second
        for bad in ({"size": 1, "fraction": 0.5}, {"size": -1}, {"fraction": 1.5}):
            with pytest.raises(ValueError):
                pool.set_limit(**bad)


# --- out of memory


def test_out_of_memory_is_cupys_error_and_ours_with_our_numbers(
    current: Current, tmp_path: Path, cli: Cli
) -> None:
    """And a recording that `info` counts the failed requests of."""
    path = tmp_path / "run.trace"
    small = FakePlatform(current, lambda _: simulated(capacity=8 * MIB))
    with install(small, record=str(path)) as pool:
        kept = cupy.ndarray((5 * MIB,), "u1")
        for kind in (cupy.cuda.memory.OutOfMemoryError, OutOfMemoryError, MemoryError):
            with pytest.raises(kind, match=f"{4 * MIB:,} bytes asked for; {5 * MIB:,} live") as caught:
                cupy.ndarray((4 * MIB,), "u1")
        error = pickle.loads(pickle.dumps(caught.value))
        assert (type(error), str(error)) == (type(caught.value), str(caught.value))
        assert (error.asked_bytes, error._size) == (4 * MIB, 4 * MIB)
        del kept, caught
        assert cupy.ndarray((7 * MIB,), "u1").data.ptr != 0
        assert pool.used_bytes() == 0
    [device] = cli.answer("info", path)["per_device"]
    told = device["refused"]
    assert (told["count"], told["size_bytes"], told["live_bytes"]) == (3, 4 * MIB, 5 * MIB)
    first = cli.printed("info", path).splitlines()[0]
    assert "out of memory: 3 requests failed, the largest for 4 MiB" in first
    assert "with 5 MiB live" in first


def test_cupys_own_pool_gives_back_its_blocks_before_out_of_memory(
    current: Current, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Earlier:
        calls = 0

        def free_all_blocks(self) -> None:
            self.calls += 1
            for device in platform.devices.values():
                device.set_capacity(8 * MIB)  # type: ignore[attr-defined]

    earlier = Earlier()
    monkeypatch.setattr(cupy, "_default_memory_pool", earlier)
    platform = FakePlatform(current, lambda _: simulated(capacity=2 * MIB))
    with install(platform):
        cupy.get_default_memory_pool().free_all_blocks()  # before any array of ours
        assert earlier.calls == 1
        earlier.calls = 0
        array = cupy.ndarray((6 * MIB,), "u1")
        assert earlier.calls == 1
        with pytest.raises(OutOfMemoryError):
            cupy.ndarray((6 * MIB,), "u1")
        assert earlier.calls == 2
        cupy.get_default_memory_pool().free_all_blocks()
        assert earlier.calls == 3
        del array
    assert cupy.get_default_memory_pool() is earlier


def test_driver_refusal_is_not_reported_as_out_of_memory(current: Current, fake: FakeCuda) -> None:
    with install(FakePlatform(current, fake.device)):
        fake.fail("cuMemAlloc_v2")
        with pytest.raises(RuntimeError, match=r"CUDA error: .*CUDA_ERROR_INVALID_VALUE.*1,000 bytes"):
            cupy.ndarray((1000,), "u1")
        fake.fail("cuMemAlloc_v2", times=0)
        assert cupy.ndarray((1000,), "u1").data.ptr != 0


def test_out_of_memory_remains_the_error_despite_other_driver_errors(
    current: Current, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other errors occur on another thread between the tries, or in a wait during a foreign capture."""

    class Earlier:
        def free_all_blocks(self) -> None:
            assert on_another_thread(platform.devices[0].memory) == (0, 0)

    monkeypatch.setattr(cupy, "_default_memory_pool", Earlier())
    platform = FakePlatform(current, fake.device)
    fake.set_capacity(64 * MIB)
    fake.fail("cuMemGetInfo_v2")
    with install(platform):
        kept = cupy.ndarray((40 * MIB,), "u1")
        for blocking in (True, False):
            stream = fake.stream(blocking=blocking)
            fake.begin_capture(stream)
            before = platform.devices[0].errors  # type: ignore[attr-defined]
            with pytest.raises(OutOfMemoryError, match="62,914,560 bytes asked for"):
                cupy.ndarray((60 * MIB,), "u1")
            assert platform.devices[0].errors >= before + 2  # type: ignore[attr-defined]
            fake.end_capture(stream)
        del kept


# --- installing


def test_arrays_made_before_and_after_the_pool_keep_their_allocator(platform: FakePlatform) -> None:
    def before(size: int) -> Any:
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(4096, size, None, 0), 0)

    with cupy.cuda.using_allocator(before):
        earlier = cupy.ndarray((10,), "f4")
    pool = install(platform)
    array = cupy.ndarray((1000,), "f4")
    core = pool.pool(0).core
    pool.close()
    assert earlier.data.ptr == 4096
    assert core.owns(array.data.ptr)
    view = array[5:]
    del array
    assert core.stats()["live_blocks"] == 1
    del view
    assert core.stats()["live_blocks"] == 0


def test_second_pool_and_second_uninstall_are_refused(pool: CupyPool, platform: FakePlatform) -> None:
    with pytest.raises(UsageError, match=r"CuPy has a pool already: mempool\.cupy\.uninstall\(\) it first"):
        install(platform)
    assert mempool.cupy.installed() is pool
    assert cupy.ndarray((10,), "f4").data.ptr != 0
    mempool.cupy.uninstall()
    with pytest.warns(RuntimeWarning, match="no pool is installed in CuPy"):
        mempool.cupy.uninstall()


def test_inside_using_allocator_nothing_is_changed(platform: FakePlatform) -> None:
    with cupy.cuda.using_allocator(None), pytest.raises(UsageError, match="install the pool outside"):
        install(platform)
    assert not mempool.cupy.is_installed()
    pool = install(platform)
    for other in (cupy.cuda.get_allocator(), len):
        with cupy.cuda.using_allocator(other), pytest.raises(UsageError, match="uninstall the pool outside"):
            mempool.cupy.uninstall()
    assert cupy.ndarray((10,), "f4").data.ptr != 0
    assert cupy.cuda.Stream.begin_capture._mempool is pool._captures
    mempool.cupy.uninstall()


def test_allocator_set_by_the_program_is_kept_at_uninstall(platform: FakePlatform) -> None:
    before = cupy.cuda.get_allocator()
    install(platform)
    cupy.cuda.set_allocator(len)
    with pytest.warns(RuntimeWarning, match="not the pool's any more"):
        mempool.cupy.uninstall()
    assert cupy.cuda.get_allocator() is len
    cupy.cuda.set_allocator(before)


def test_closed_pool_still_serves_requests(platform: FakePlatform, current: Current) -> None:
    pool = install(platform)
    train(pool)
    pool.close()
    pool.close()
    assert pool.state == "closed"
    one = pool.malloc(1000)
    with current.on(device=1):
        other = pool.malloc(1000)
    assert (one.device_id, other.device_id) == (0, 1)
    assert pool.pool(1).core.owns(other.ptr)


def test_missing_driver_old_driver_and_missing_device_name_the_remedy(
    fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"libno-such-cuda\.so.*install NVIDIA's driver"):
        mempool.cupy.install(driver="libno-such-cuda.so")
    assert not mempool.cupy.is_there("libno-such-cuda.so")
    assert mempool.cupy.is_there(fake.driver)

    def too_old() -> int:
        raise cupy.cuda.runtime.CUDARuntimeError(35)

    monkeypatch.setattr("cupy.cuda.runtime.getDeviceCount", too_old)
    with pytest.raises(UsageError, match=r"(?i)insufficient.*install a newer driver"):
        mempool.cupy.install(driver=fake.driver)
    monkeypatch.setattr("cupy.cuda.runtime.getDeviceCount", lambda: 0)
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES"):
        mempool.cupy.install(driver=fake.driver)
    assert fake.calls("cuInit") == 0
    monkeypatch.setattr("cupy.cuda.runtime.is_hip", True)
    with pytest.raises(UsageError, match="ROCm"):
        mempool.cupy.install(driver=fake.driver)
    assert not mempool.cupy.is_installed()


def test_missing_device_is_refused_and_the_pool_goes_on(
    fake: FakeCuda, current: Current, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cupy.cuda.runtime.getDeviceCount", lambda: 2)
    platform = Cuda(fake.driver)
    monkeypatch.setattr(platform, "current", current.capsules)
    with mempool.cupy._install(platform, {"background": False}) as pool:
        for index in (2, -1):
            with (
                current.on(device=index),
                pytest.raises((UsageError, RuntimeError), match=f"no CUDA device {index}"),
            ):
                cupy.ndarray((10,), "f4")
        with current.on(device=1):
            assert cupy.ndarray((10,), "f4").data.device_id == 1
        assert list(pool.pools) == [1]

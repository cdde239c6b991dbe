"""PyTorch's functions for CUDA memory, answered by a pool on a simulated device."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import pickle
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from cuda_stubs import NAMES, gpu, pretend
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.cuda import _memory_viz

from mempool import OutOfMemoryError, Pool
from mempool.torch.introspection import statistics

KIB, MIB = 1 << 10, 1 << 20
STATS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
COUNTERS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
    "max_split_size",
)
#: Fields that PyTorch's viewer reads.
SEGMENT_KEYS = {
    "address",
    "total_size",
    "stream",
    "segment_type",
    "segment_pool_id",
    "allocated_size",
    "active_size",
    "requested_size",
    "is_expandable",
    "device",
    "blocks",
}
BLOCK_KEYS = {"address", "size", "requested_size", "state", "frames"}

sizes = st.one_of(st.integers(1, 600), st.integers(513, 20 * KIB), st.integers(MIB // 2, 4 * MIB))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), sizes, st.sampled_from([0, 0, 7])),
        st.tuples(st.just("free"), st.integers(0, 1000), st.sampled_from([0, 0, 7])),
        st.tuples(st.sampled_from(["trim", "look", "reset_peak"]), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@contextlib.contextmanager
def answering(*pools: Pool, devices: int | None = None) -> Iterator[list[str]]:
    """Let pools serve the first devices of a simulated machine."""
    with pytest.MonkeyPatch.context() as patch:
        refused = pretend(patch, len(pools) if devices is None else devices)
        statistics.replace_functions(
            lambda index: (pools[index].client, pools[index].core) if index < len(pools) else None
        )
        try:
            yield refused
        finally:
            statistics.restore_functions()


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(gpu(), background=False) as made:
        yield made


@pytest.fixture
def answered(pool: Pool) -> Iterator[Pool]:
    with answering(pool):
        yield pool


def perform(pool: Pool, program: list[tuple[str, int, int]]) -> dict[int, int]:
    """Run a program; return the live buffers and their requested sizes."""
    live: dict[int, int] = {}
    for verb, number, stream in program:
        if verb == "alloc":
            live[pool.allocate(number, stream=stream)] = number
        elif verb == "free" and live:
            address = sorted(live)[number % len(live)]
            pool.free(address, stream=stream)
            del live[address]
        elif verb == "trim":
            pool.trim()
        elif verb == "look":
            torch.cuda.memory_stats(0)
        elif verb == "reset_peak":
            torch.cuda.reset_peak_memory_stats(0)
    return live


class TestStatistics:
    @settings(max_examples=60)
    @given(program=steps, page=st.sampled_from([0, 4096, 1 << 16]))
    def test_balances_add_up(self, program: list[tuple[str, int, int]], page: int) -> None:
        """The sum of "small" and "large" is "all", and current is allocated less freed, at most the peak."""
        with Pool(gpu(page), background=False) as pool, answering(pool):
            live = perform(pool, program)
            nested = torch.cuda.memory.memory_stats_as_nested_dict(0)
            for name in STATS:
                parts = nested[name]
                for key in ("current", "allocated", "freed"):
                    assert parts["all"][key] == parts["small_pool"][key] + parts["large_pool"][key]
                for stat in parts.values():
                    assert 0 <= stat["current"] <= stat["peak"]
                    assert stat["allocated"] - stat["freed"] == stat["current"]
                    assert stat["freed"] >= 0
            assert nested["requested_bytes"]["all"]["current"] == sum(live.values())
            assert nested["allocation"]["all"]["current"] == len(live)
            assert torch.cuda.memory_reserved(0) == pool.device.counts().committed

    def test_keys_match_pytorchs_allocator(self, answered: Pool) -> None:
        kinds = ("all", "small_pool", "large_pool")
        values = ("current", "peak", "allocated", "freed")
        expected = {".".join(parts) for parts in itertools.product(STATS, kinds, values)}
        expected |= {f"oversize_{what}.{value}" for what in ("allocations", "segments") for value in values}
        found = torch.cuda.memory_stats()
        assert expected | set(COUNTERS) <= set(found)
        assert set(found) - expected - set(COUNTERS) <= {"num_oom_rejections"}
        assert all(isinstance(value, int) for value in found.values())

    def test_totals_reset(self, answered: Pool) -> None:
        answered.free(answered.allocate(MIB))
        answered.allocate(100)
        torch.cuda.reset_accumulated_memory_stats()
        stats = torch.cuda.memory_stats()
        assert all(value == 0 for key, value in stats.items() if key.endswith((".allocated", ".freed"))), (
            stats
        )
        answered.allocate(2 * MIB)
        stats = torch.cuda.memory_stats()
        assert stats["allocated_bytes.all.allocated"] == 2 * MIB
        assert stats["allocation.all.allocated"] == 1

    def test_refused_request_is_counted(self, pool: Pool) -> None:
        pool.device.set_capacity(MIB)
        with answering(pool):
            with pytest.raises(OutOfMemoryError):
                pool.allocate(8 * MIB)
            stats = torch.cuda.memory_stats()
            assert stats["num_ooms"] == 1
            assert stats["num_alloc_retries"] >= 1
            torch.cuda.reset_accumulated_memory_stats()
            assert torch.cuda.memory_stats()["num_ooms"] == 0

    def test_resetting_peaks_keeps_the_pools_peaks(self, answered: Pool) -> None:
        answered.free(answered.allocate(64 * MIB))
        answered.release()
        before = answered.core.stats()["reserved"]["peak"]
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_reserved() == torch.cuda.memory_reserved() < before
        assert answered.core.stats()["reserved"]["peak"] == before

    def test_devices_are_separate(self) -> None:
        with Pool(gpu(), background=False) as first, Pool(gpu(), background=False) as second:
            second.allocate(MIB)
            with answering(first, second, devices=3) as refused:
                assert torch.cuda.memory_allocated(0) == 0
                assert torch.cuda.memory_allocated(1) == MIB
                assert torch.cuda.memory_allocated(2) == torch.cuda.max_memory_reserved(2) == 0
                torch.cuda.reset_peak_memory_stats(2)
                assert "Allocated memory" in torch.cuda.memory_summary(2)
                assert torch.cuda.get_per_process_memory_fraction(2) == 1.0
                assert refused == []
                snapshot = torch.cuda.memory._snapshot()
                assert {segment["device"] for segment in snapshot["segments"]} == {1}
                assert len(snapshot["device_traces"]) == 3


class TestSnapshot:
    @settings(max_examples=60)
    @given(program=steps, page=st.sampled_from([0, 4096, 1 << 16]))
    def test_snapshot_agrees_with_statistics_and_history(
        self, program: list[tuple[str, int, int]], page: int
    ) -> None:
        """Blocks fill segments, segments fill the reserved bytes, and the history has the live buffers."""
        with Pool(gpu(page), background=False) as pool, answering(pool):
            torch.cuda.memory._record_memory_history()
            live = perform(pool, program)
            snapshot, stats = torch.cuda.memory._snapshot(), torch.cuda.memory_stats(0)
            for segment in snapshot["segments"]:
                end = segment["address"]
                for block in segment["blocks"]:
                    assert block["address"] == end
                    end += block["size"]
                assert end == segment["address"] + segment["total_size"]
            blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
            lives = [block for block in blocks if block["state"] == "active_allocated"]
            assert {block["address"]: block["requested_size"] for block in lives} == live
            assert sum(block["size"] for block in lives) == stats["allocated_bytes.all.current"]
            for kind in ("small", "large"):
                of_kind = [s for s in snapshot["segments"] if s["segment_type"] == kind]
                assert len(of_kind) == stats[f"segment.{kind}_pool.current"]
                assert sum(s["total_size"] for s in of_kind) == stats[f"reserved_bytes.{kind}_pool.current"]
                used = [s for s in of_kind if s["active_size"] != 0]
                idle = sum(s["total_size"] - s["active_size"] for s in used)
                assert idle == stats[f"inactive_split_bytes.{kind}_pool.current"]
            assert relived(snapshot["device_traces"][0]) == live
            ends = ((s["address"], s["address"] + s["total_size"]) for s in snapshot["segments"])
            assert held(snapshot["device_traces"][0]) == joined(sorted(ends))

    def test_planned_buffers_are_included(self, answered: Pool) -> None:
        torch.cuda.memory._record_memory_history()
        kept: list[int] = []
        for _ in range(8):
            answered.step()
            for address in kept:
                answered.free(address)
            kept = [answered.allocate(size * KIB) for size in (700, 900, 1100, 33)]
            answered.plan_now()
        assert answered.state == "replaying"
        snapshot = torch.cuda.memory._snapshot()
        assert sum(s["active_size"] for s in snapshot["segments"]) == torch.cuda.memory_allocated()
        found = [b["address"] for s in snapshot["segments"] for b in s["blocks"] if b["requested_size"]]
        assert sorted(found) == sorted(kept)
        assert sorted(relived(snapshot["device_traces"][0])) == sorted(kept)
        assert sum(s["total_size"] for s in snapshot["segments"]) == torch.cuda.memory_reserved()

    def test_pytorchs_viewer_opens_the_snapshot(self, answered: Pool, tmp_path: Any) -> None:
        torch.cuda.memory._record_memory_history(max_entries=1000, context=None, stacks="python")
        kept = [answered.allocate(size, stream=7) for size in (100, 3000, 5 * MIB, 40 * KIB)]
        answered.free(kept.pop(2), stream=7)
        answered.free(kept.pop(0), stream=7)
        torch.cuda.memory._dump_snapshot(str(tmp_path / "snapshot.pickle"))
        packed = (tmp_path / "snapshot.pickle").read_bytes()
        snapshot = Plain(io.BytesIO(packed)).load()
        assert packed[1] <= 4  # the protocol
        for segment in snapshot["segments"]:
            assert set(segment) >= SEGMENT_KEYS
            assert all(set(block) >= BLOCK_KEYS for block in segment["blocks"])
        assert "total_allocated" in _memory_viz.segsum(snapshot)
        assert "5.0MiB" in _memory_viz.trace(snapshot)
        for draw in (_memory_viz.segments, _memory_viz.memory):
            assert "active_allocated" in draw(snapshot, format_flamegraph=str)
        same = snapshot["segments"]
        assert _memory_viz.compare(same, same, format_flamegraph=str) == ""
        for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
            assert "MemoryViz" in plot(snapshot)
        assert "MemoryViz" in _memory_viz.trace_plot(snapshot, filter_freed=True)

    def test_snapshot_during_allocations_and_collections(self, answered: Pool) -> None:
        """Creating Python objects may collect garbage, which frees buffers: the pool's lock must be free."""
        torch.cuda.memory._record_memory_history(max_entries=500)
        litter, thresholds = Litter(answered), gc.get_threshold()
        threads = [threading.Thread(target=litter.work, args=(seed,)) for seed in range(3)]
        gc.freeze()  # other tests' objects would slow down the collections
        gc.set_threshold(1, 1, 1)
        try:
            for thread in threads:
                thread.start()
            for _ in range(20):
                gc.disable()
                for size in (100, 3000, 2 * MIB):
                    Owner(litter, size)  # garbage that the creation of the next container collects
                gc.enable()
                snapshot, stats = torch.cuda.memory._snapshot(), torch.cuda.memory_stats()
                assert len(snapshot["device_traces"][0]) <= 500
                assert stats["allocated_bytes.all.current"] <= stats["allocated_bytes.all.peak"]
        finally:
            gc.enable()
            gc.set_threshold(*thresholds)
            gc.unfreeze()
            litter.stop.set()
            for thread in threads:
                thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        gc.collect()
        assert (litter.wrong, litter.made > 0, litter.made - litter.ended) == ([], True, 0)
        assert torch.cuda.memory_allocated() == 0


class TestHistory:
    def test_history_is_off_by_default(self, answered: Pool) -> None:
        answered.allocate(MIB)
        assert torch.cuda.memory._snapshot()["device_traces"] == [[]]
        assert not torch._C._cuda_isHistoryEnabled()
        torch.cuda.memory._record_memory_history()
        assert torch._C._cuda_isHistoryEnabled()
        answered.allocate(MIB)
        assert actions() == ["segment_map", "alloc"]
        torch.cuda.memory._record_memory_history(enabled=None)
        assert actions() == []

    @pytest.mark.parametrize(
        ("given", "options", "expected"),
        [
            ((), {"max_entries": 2}, ["free_requested", "free_completed"]),
            ((), {"skip_actions": ["free_requested", "segment_map"]}, ["alloc", "free_completed"]),
            (("state",), {}, []),
            ((True,), {"trace_alloc_max_entries": 3}, ["alloc", "free_requested", "free_completed"]),
        ],
    )
    def test_options_select_the_entries(
        self, answered: Pool, given: tuple[Any, ...], options: dict[str, Any], expected: list[str]
    ) -> None:
        torch.cuda.memory._record_memory_history(*given, **options)
        answered.free(answered.allocate(100))
        assert actions() == expected

    def test_later_pool_inherits_the_history(self, pool: Pool) -> None:
        """A pool that replaces another keeps the history."""
        with Pool(gpu(), background=False) as former, pytest.MonkeyPatch.context() as patch:
            pretend(patch)
            statistics.replace_functions(lambda _: (former.client, former.core))
            torch.cuda.memory._record_memory_history()
            statistics.replace_functions(lambda _: (pool.client, pool.core))
            pool.allocate(100)
            assert actions() == ["segment_map", "alloc"]
            statistics.restore_functions()

    def test_hits_are_recorded(self, answered: Pool) -> None:
        """Hits are recorded until the history ends."""
        for _ in range(8):
            answered.step()
            for address in [answered.allocate(size * KIB) for size in (700, 900, 1100)]:
                answered.free(address)
            answered.plan_now()
        torch.cuda.memory._record_memory_history()
        hits = answered.report().values["hits"]
        answered.step()
        for address in [answered.allocate(size * KIB) for size in (700, 900, 1100)]:
            answered.free(address)
        assert answered.report().values["hits"] == hits + 3
        assert actions() == ["alloc"] * 3 + ["free_requested", "free_completed"] * 3
        sizes = [entry["size"] // KIB for entry in torch.cuda.memory._snapshot()["device_traces"][0]]
        assert sizes == [700, 900, 1100, 700, 700, 900, 900, 1100, 1100]


class TestReplacing:
    def test_functions_are_restored(self, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch)
        before = {name: getattr(torch._C, name) for name in NAMES}
        statistics.replace_functions(lambda _: (pool.client, pool.core))
        statistics.replace_functions(lambda _: (pool.client, pool.core))
        address = pool.allocate(MIB)
        assert torch.cuda.memory_allocated() == MIB
        statistics.restore_functions()
        statistics.restore_functions()
        assert {name: getattr(torch._C, name) for name in NAMES} == before
        assert pool.core.owns(address)
        pool.free(address)

    def test_later_replacement_is_kept(self, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch)
        original = torch._C._cuda_memoryStats
        monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda device: {"whose": ("theirs", device)})
        theirs = torch._C._cuda_memoryStats
        statistics.replace_functions(lambda _: (pool.client, pool.core))
        ours = torch._C._cuda_memoryStats
        monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda device: ours(device))
        around = torch._C._cuda_memoryStats
        assert torch.cuda.memory_allocated() == 0
        statistics.restore_functions()
        assert torch._C._cuda_memoryStats is around
        assert torch._C._cuda_memoryStats(3) == theirs(3)  # passed on to the replaced function
        assert original is not theirs

    def test_history_ends_with_the_replacement(self, pool: Pool) -> None:
        with answering(pool):
            torch.cuda.memory._record_memory_history(max_entries=sys.maxsize)
        with answering(pool):
            assert not torch._C._cuda_isHistoryEnabled()
            pool.allocate(100)
            assert actions() == []


class Litter:
    """Buffers freed only by the garbage collector, a few at a time."""

    def __init__(self, pool: Pool) -> None:
        self.pool, self.stop = pool, threading.Event()
        self.made = self.ended = 0
        self.lock = threading.RLock()
        self.wrong: list[BaseException] = []

    def work(self, seed: int) -> None:
        draw = random.Random(seed)
        try:
            while not self.stop.wait(0.001):
                for _ in range(20):
                    Owner(self, draw.choice([100, 3000, 2 * MIB]))
                while self.made - self.ended > 200 and not self.stop.wait(0.001):
                    gc.collect()  # all generations
        except BaseException as error:
            self.wrong.append(error)


class Owner:
    def __init__(self, litter: Litter, size: int) -> None:
        self.address, self.litter, self.me = litter.pool.allocate(size), litter, self
        with litter.lock:
            litter.made += 1

    def __del__(self) -> None:
        self.litter.pool.free(self.address)
        with self.litter.lock:
            self.litter.ended += 1


class Plain(pickle.Unpickler):
    """An unpickler that allows built-in types only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a snapshot")


def actions() -> list[str]:
    """Return the actions of device 0."""
    return [entry["action"] for entry in torch.cuda.memory._snapshot()["device_traces"][0]]


def relived(trace: list[dict[str, Any]]) -> dict[int, int]:
    """Return the size of each live buffer at the end of a trace, by address."""
    live: dict[int, int] = {}
    for entry in trace:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            assert live.pop(entry["addr"]) == entry["size"]
    return live


def held(trace: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return the reserved ranges at the end of a trace; assert that its events are consistent."""
    ranges: list[tuple[int, int]] = []
    for entry in trace:
        if entry["action"] in ("segment_alloc", "segment_map"):
            begin, end = entry["addr"], entry["addr"] + entry["size"]
            assert not any(begin < last and first < end for first, last in ranges)
            ranges = joined(sorted([*ranges, (begin, end)]))
        elif entry["action"] in ("segment_free", "segment_unmap"):
            begin, end = entry["addr"], entry["addr"] + entry["size"]
            (around,) = [(first, last) for first, last in ranges if first <= begin and end <= last]
            ranges.remove(around)
            ranges.extend((a, b) for a, b in ((around[0], begin), (end, around[1])) if a < b)
            ranges.sort()
    return ranges


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort ranges and merge adjacent ones."""
    whole: list[tuple[int, int]] = []
    for begin, end in ranges:
        if whole and whole[-1][1] == begin:
            whole[-1] = (whole[-1][0], end)
        else:
            whole.append((begin, end))
    return whole

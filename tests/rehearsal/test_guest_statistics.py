"""Statistics, snapshots, histories and profiles of PyTorch with the guest, on the stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import alone, run_each_alone

if __name__ == "__main__":  # pytest's own process has no stand-in, without which PyTorch cannot be imported
    import torch
    from guest_programs import MIB, install, iteration, planned, silent, tensor, train, values


@alone
def test_statistics_and_snapshot_show_planned_tensors() -> None:
    pool = install()
    for _ in range(12):
        pool.step()
        made = [tensor(size) for size in (5000, MIB + 100, MIB + 100)]
        pool.plan_now()
    assert planned(pool, *made) == [True] * 3
    assert torch.cuda.memory_allocated() == 5120 + 2 * (MIB + 512)
    statistics = torch.cuda.memory_stats()
    for name, count, requested in (("all", 3, 5000 + 2 * (MIB + 100)), ("small_pool", 1, 5000)):
        assert statistics[f"requested_bytes.{name}.current"] == requested
        assert statistics[f"allocation.{name}.current"] == count
    blocks = {
        block["address"]: (block["size"], block["requested_size"])
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert blocks == {one.data_ptr(): ((one.nbytes + 511) // 512 * 512, one.nbytes) for one in made}
    for segment in torch.cuda.memory_snapshot():
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    made.clear()
    assert torch.cuda.memory_allocated() == 0


@alone
def test_statistics_and_snapshot_show_freed_planned_tensors_that_a_stream_uses_as_native_does() -> None:
    side = torch.cuda.Stream()

    def shown() -> list[Any]:
        statistics = torch.cuda.memory_stats()
        names = ("allocation", "allocated_bytes", "active", "active_bytes", "requested_bytes")
        counts = [statistics[f"{name}.{kind}.current"] for name in names for kind in ("all", "large_pool")]
        snapshot = torch.cuda.memory_snapshot()
        sizes = [sum(one[key] for one in snapshot) for key in ("allocated_size", "active_size")]
        blocks = (block for segment in snapshot for block in segment["blocks"])
        states = sorted((block["requested_size"], block["state"]) for block in blocks)
        return [counts, sizes, [one for one in states if one[1] != "inactive"]]

    def program() -> list[Any]:
        made = tensor(2 * MIB)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copied = made.clone()
        made.record_stream(side)
        before = shown()
        del made
        during = shown()
        torch.cuda.synchronize()
        tensor(50 * MIB)
        del copied
        return [before, during, shown()]

    native = program()
    assert (2 * MIB, "active_pending_free") in native[1][2]
    pool = install()
    for _ in range(12):
        pool.step()
        made = tensor(2 * MIB)
        assert planned(pool, made) == [values(pool)["hits"] != 0]
        del made
        pool.plan_now()
    pool.step()
    assert program() == native
    assert values(pool)["hits"] > 0


@alone
def test_statistics_count_no_arena_that_a_new_plan_has_released() -> None:
    pool = install()
    released = False
    for count in 8 * [3] + 8 * [5]:
        pool.step()
        made = [tensor(5 * MIB) for _ in range(count)]
        del made
        before = pool.client.pool.stats()["arena_bytes"]
        pool.plan_now()
        released = released or pool.client.pool.stats()["arena_bytes"] < before
        assert torch.cuda.memory_allocated() == torch.cuda.memory_stats()["allocation.all.current"] == 0
        blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
        assert {block["state"] for block in blocks} <= {"inactive"}
    assert released


@alone
def test_statistics_count_no_freed_tensor_of_a_closed_pool_whose_stream_has_completed() -> None:
    pool, side = install(), torch.cuda.Stream()
    for _ in range(12):
        pool.step()
        tensor(2 * MIB)
        pool.plan_now()
    pool.step()
    made = tensor(2 * MIB)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made.clone()
    made.record_stream(side)
    assert planned(pool, made) == [True]
    del made
    pool.close()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["active.all.current"] == 0


@alone
def test_snapshot_with_a_history_shows_the_arena_as_the_history_does(tmp_path: str) -> None:
    from mempool.offline import read_input

    torch.cuda.memory._record_memory_history(stacks="python")
    pool = install()
    for _ in range(12):
        pool.step()
        kept = [tensor(MIB) for _ in range(3)]
        pool.plan_now()
    del kept[0]
    assert planned(pool, *kept) == [True] * 2
    torch.cuda.memory._dump_snapshot(f"{tmp_path}/snapshot.pickle")
    recording = read_input(Path(tmp_path, "snapshot.pickle"), whole=True)
    assert recording.trace.load().max() == torch.cuda.memory_stats()["allocated_bytes.all.peak"]


@alone
def test_statistics_count_tensors_in_the_arenas_of_two_pools() -> None:
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    kept: list[torch.Tensor] = []
    for size in (5, 13):  # MiB; the second pool keeps none of the first one's places
        pool = install()
        made: list[torch.Tensor] = []
        for _ in range(12):
            pool.step()
            made.clear()
            made += [tensor(size * MIB + 100) for _ in range(3)]
            pool.plan_now()
        assert planned(pool, *made) == [True] * 3
        kept += made
        pool.close()
    statistics = torch.cuda.memory_stats()
    assert statistics["allocation.all.current"] == len(kept)
    assert statistics["requested_bytes.all.current"] == sum(one.nbytes for one in kept)
    assert statistics["allocated_bytes.all.current"] == sum(one.nbytes + 512 - 100 for one in kept)


def history(**options: Any) -> tuple[list[Any], set[Any]]:
    """Return what PyTorch's history has of an iteration, and the frames of the tensors alive at its end."""
    torch.cuda.memory._record_memory_history(stacks="python", clear_history=True, **options)
    iteration()
    for _ in range(300):
        kept = [tensor(4096), tensor(100)]  # of the plan, and of native
    if hasattr(torch.cuda.memory, "_annotate_tensor"):  # from PyTorch 2.14 on
        for one in kept:
            torch.cuda.memory._annotate_tensor(one, "kept")
    with torch.cuda.stream(torch.cuda.ExternalStream(2)):
        kept = [tensor(MIB), tensor(100)]
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(None)
    del kept

    def frames(entry: Any) -> tuple[Any, ...]:
        return tuple(map(str, entry.get("frames", ())))

    keys = ("action", "size", "stream", "compile_context", "user_metadata")
    trace = [
        (*(entry[key] for key in keys), frames(entry))
        for entry in snapshot["device_traces"][0]
        if not entry["action"].startswith("segment")
    ]
    blocks = (block for segment in snapshot["segments"] for block in segment["blocks"])
    return trace, {frames(block) for block in blocks if block["state"] == "active_allocated"}


@pytest.mark.parametrize("context", ["all", "alloc", "state", ""])
@alone
def test_history_has_planned_requests_as_native_records_them(context: str) -> None:
    settings = [
        {},
        {"max_entries": 40},
        {"skip_actions": ["free_completed", "alloc"]},
        {"skip_actions": ["annotate"]} if hasattr(torch.cuda.memory, "_annotate_tensor") else {},
        {"enabled": "state"},
        {"compile_context": True},
    ]
    recorded = {}
    for name in ("native", "guest"):
        if name == "guest":
            pool = install()
            for _ in range(12):
                pool.step()
                history()
                pool.plan_now()
        hits = values(pool)["hits"] if name == "guest" else 0
        recorded[name] = []
        for options in settings:
            if name == "guest":
                pool.step()
            recorded[name].append(history(context=context or None, **options))
    assert values(pool)["hits"] > hits + 100
    for (native, alive), (guest, guest_alive) in zip(recorded["native"], recorded["guest"], strict=True):
        assert (sorted(native), alive) == (sorted(guest), guest_alive)
        if context == "all":  # else, and of a use on another stream, only the clock tells the order
            native, guest = (
                [one for one in trace if one[0] != "free_completed"] for trace in (native, guest)
            )
            assert native == guest


@alone
def test_history_of_a_device_keeps_its_entries_while_another_device_allocates() -> None:
    pool = None
    sizes: dict[str, list[int]] = {}
    for name in ("native", "guest"):
        if name == "guest":
            pool = install()
        for _ in range(12 if pool is not None else 1):
            if pool is not None:
                pool.step()
            torch.cuda.memory._record_memory_history(max_entries=20, clear_history=True)
            kept = [tensor((number + 1) * MIB) for number in range(8)]
            for _ in range(60):
                torch.empty(MIB, dtype=torch.uint8, device="cuda:1")
            entries = torch.cuda.memory._snapshot()["device_traces"][0]
            sizes[name] = [entry["size"] for entry in entries if not entry["action"].startswith("segment")]
            torch.cuda.memory._record_memory_history(None)
            if pool is not None:
                assert planned(pool, *kept) == [values(pool)["hits"] != 0] * 8
                pool.plan_now()
            kept.clear()
    assert values(pool)["hits"] >= 8
    assert sizes["guest"] == sizes["native"] == [(number + 1) * MIB for number in range(8)], sizes


@alone
def test_history_of_arenas_that_come_and_go_reads_as_the_programs_tensors(tmp_path: str) -> None:
    import torch.cuda._memory_viz as viz

    from mempool.offline import read_input

    pool = install()
    torch.cuda.memory._record_memory_history(stacks="python")
    for count in (3, 5, 2):
        for _ in range(8):
            pool.step()
            kept = [tensor((number + 1) * MIB) for number in range(count)]
            assert torch.cuda.memory_allocated() == sum(one.nbytes for one in kept)
            del kept
            pool.plan_now()
        torch.cuda.empty_cache()
        torch.cuda.empty_cache()
    made = tensor(2 * MIB)
    pool.close()
    torch.cuda.memory._dump_snapshot(f"{tmp_path}/snapshot.pickle")
    snapshot = torch.cuda.memory._snapshot()
    recording = read_input(Path(tmp_path, "snapshot.pickle"), whole=True)
    assert recording.trace.load().max() == 15 * MIB
    assert recording.trace.load()[-1] == made.nbytes
    allocated = [entry for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"]
    assert len(allocated) == 8 * (3 + 5 + 2) + 1
    assert {entry["user_metadata"] for entry in snapshot["device_traces"][0]} == {""}
    assert [entry["action"] for entry in snapshot["device_traces"][0]].count("snapshot") == 1  # of the dump
    assert viz.trace(snapshot)
    assert viz.segsum(snapshot)


@alone
def test_report_counts_all_reserved_bytes_of_pytorchs_allocator() -> None:
    pool = install()
    assert values(pool)["reserved_peak_bytes"] == pool.metrics()["reserved_bytes"] == 0
    kept = tensor(50 * MIB)
    train(pool)
    report, held = values(pool), torch.cuda.memory_reserved()
    assert report["hits"] > 0
    assert (
        report["reserved_bytes"]
        == pool.metrics()["reserved_bytes"]
        == held
        >= kept.nbytes + report["arena_bytes"]
    )
    assert report["reserved_peak_bytes"] == torch.cuda.max_memory_reserved() >= report["live_peak_bytes"]
    assert (
        f"reserved at most {report['reserved_peak_bytes'] / report['live_peak_bytes']:.2f} x that"
        in pool.report().verdict
    )
    pool.close()
    del kept
    torch.cuda.empty_cache()
    assert values(pool)["reserved_bytes"] == held


@alone
def test_profiler_sees_planned_tensors() -> None:
    pool = install()
    train(pool)
    with silent(), torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
        pool.step()
        kept = [tensor(4096 * (layer % 3 + 1)) for layer in range(3)]
    sizes = [event.device_memory_usage for event in profile.events() if event.name == "aten::empty"]
    assert sum(size > 0 for size in sizes) >= 3
    del kept


if __name__ == "__main__":
    run_each_alone(globals())

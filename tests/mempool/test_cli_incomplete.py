"""Reports of incomplete recordings: the missing facts are named, and no claim depends on them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from answers import answer, printed
from snapshots import event, segment, snapshot

from mempool.cli.app import call

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20
CASES = Path(__file__).parents[2] / "../shared/cases"


def stored(path: Path, *devices: Sequence[Any], **more: Any) -> str:
    path.write_bytes(pickle.dumps(snapshot(*map(list, devices), **more), 4))
    return str(path)


def shared(name: str) -> str:
    if not (CASES / name).exists():
        pytest.skip(f"{CASES / name} is not here")
    return str(CASES / name)


def kept(*sizes: int) -> list[dict[str, Any]]:
    """Segments of 1000 MiB, each with a buffer of so many bytes."""
    return [
        segment(
            (at << 40, size, size, "active_allocated"), ((at << 40) + size, 1000 * MIB - size, 0, "inactive")
        )
        for at, size in enumerate(sizes, 1)
    ]


def without_history(tmp_path: Path) -> str:
    return stored(tmp_path / "s", [], segments=kept(100 * MIB, 300 * MIB))


def window(tmp_path: Path) -> str:
    """Ten allocs and frees of 100 MiB long after 2000 MiB were reserved."""
    events = [event(what, 3 << 40, 100 * MIB, 2 * at + k) for at in range(10) for k, what in PAIR]
    held = [*kept(100 * MIB, 300 * MIB), segment((3 << 40, 1000 * MIB, 0, "inactive"))]
    return stored(tmp_path / "s", events, segments=held)


PAIR = ((0, "alloc"), (1, "free_completed"))


def died(tmp_path: Path, *, frames: Any = ()) -> str:
    """400 MiB are live when 900 MiB, then 50 MiB, are refused."""
    events = [event("segment_alloc", 0, 400 * MIB, 1), event("alloc", 0, 400 * MIB, 2)]
    refused = [
        {
            "action": "oom",
            "size": size * MIB,
            "stream": 3,
            "time_us": 3,
            "frames": list(frames),
            "device_free": 7,
        }
        for size in (900, 50)
    ]
    held = [segment((0, 400 * MIB, 400 * MIB, "active_allocated"))]
    return stored(tmp_path / "s", [*events, *refused], segments=held)


def test_snapshot_without_history_reports_the_end_state_and_no_saving(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = without_history(tmp_path)
    [device] = answer(capsys, "info", path)["per_device"]
    assert (device["history"], device["remedies"], device["simulated"]) == ("absent", [], None)
    text = printed(capsys, "info", path)
    assert text.splitlines()[0].startswith(
        f"{path}: history not recorded: only the state at the end is known"
    )
    assert "load over time" not in text
    assert "up to" not in text
    assert "400 MiB" in text


def test_window_names_the_lost_beginning_and_makes_no_claim_about_earlier_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More than 2 GiB were reserved before the window, whose load is 500 MiB."""
    path = window(tmp_path)
    [device] = answer(capsys, "info", path)["per_device"]
    assert device["history"] == "window"
    assert (device["live_before_bytes"], device["reserved_before_bytes"]) == (400 * MIB, 3000 * MIB)
    assert all(remedy["saves_bytes"] < 100 * MIB for remedy in device["remedies"])
    first = printed(capsys, "info", path).splitlines()[0]
    assert "the first events are lost: 400 MiB were live, 2.93 GiB reserved before" in first


@pytest.mark.parametrize("verb", ["plan", "swap"])
def test_plans_need_a_history_and_name_a_lost_beginning(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call([verb, without_history(tmp_path)]) == 3
    assert "nothing to plan: history not recorded" in capsys.readouterr().err
    assert call([verb, window(tmp_path)]) == (0 if verb == "plan" else 3)  # it has no accesses
    assert "the first events are lost: 400 MiB were live" in capsys.readouterr().err


def test_ring_of_a_single_event_is_no_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PyTorch keeps one event of `_record_memory_history(enabled="state")`."""
    last = [event("free_completed", 9 << 40, 4, 1)]
    [device] = answer(capsys, "info", stored(tmp_path / "s", last, segments=kept(100 * MIB)))["per_device"]
    assert (device["history"], device["remedies"]) == ("absent", [])


@pytest.mark.parametrize("made", [without_history, window])
def test_limit_below_the_earlier_reservation_blames_no_recorded_request(
    made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, "compare", made(tmp_path), "--limit", "1GiB", "-a", "recorded")
    assert "recorded held more than 1 GiB before the first event that is recorded" in text
    assert "asks for" not in text


def test_state_at_the_end_is_not_called_a_peak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "compare", without_history(tmp_path))
    assert "live at the end 400 MiB" in text
    assert "peak load" not in text


def test_calls_of_a_window_are_a_lower_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "in 3 or more calls to the driver" in printed(capsys, "info", window(tmp_path))


def test_refusal_below_the_free_memory_names_a_limit_of_the_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit is not named if a segment larger than the request would not have fitted."""
    for free, told in ((400 * MIB, True), (60 * MIB, False), (40 * MIB, False)):
        refused = {"action": "oom", "size": 50 * MIB, "stream": 3, "time_us": 3, "frames": []}
        events = [event("segment_alloc", 0, MIB, 1), event("alloc", 0, MIB, 2)]
        path = stored(tmp_path / "s", [*events, refused | {"device_free": free}])
        assert ("set_per_process_memory_fraction" in printed(capsys, "info", path).splitlines()[0]) == told


@pytest.mark.parametrize(("made", "word"), [(without_history, "unknown"), (window, "in window")])
def test_limit_above_an_incomplete_recording_is_not_called_sufficient(
    made: Any, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit exceeded by the recorded part is exceeded all the same."""
    path = made(tmp_path)
    rows = answer(capsys, "compare", path, "--limit", "80GiB")
    assert {row["fits"] for row in rows} == {None}
    assert all(row["caveats"] for row in rows)
    table = printed(capsys, "compare", path, "--limit", "80GiB", "-a", "pytorch")
    assert word in table
    assert " yes " not in table
    assert {row["fits"] for row in answer(capsys, "compare", path, "--limit", "50MiB")} == {False}


def test_refused_requests_are_counted_located_and_part_of_every_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = [{"name": "forward", "filename": "/me/train.py", "line": 12}]
    path = died(tmp_path, frames=frames)
    shown = answer(capsys, "info", path)
    assert shown["refused"] == 2
    assert shown["per_device"][0]["refused"] == {
        "count": 2,
        "event": 2,
        "size_bytes": 900 * MIB,
        "live_bytes": 400 * MIB,
        "free_bytes": 7,
        "operation": None,
        "frame": "train.py:12",
    }
    first = printed(capsys, "info", path).splitlines()[0]
    assert first.endswith("the largest for 900 MiB at train.py:12, with 400 MiB live, 7 B free on the device")
    rows = {row["allocator"]: row for row in answer(capsys, "compare", path, "--limit", "1299MiB")}
    assert {row["fits"] for row in rows.values()} == {False}
    assert rows["recorded"]["failed_at"]["recorded"] is True
    assert rows["planned"]["failed_at"]["frame"] == "train.py:12"
    assert (rows["recorded"]["peak_load_bytes"], rows["planned"]["peak_load_bytes"]) == (
        400 * MIB,
        1300 * MIB,
    )
    enough = {row["allocator"]: row["fits"] for row in answer(capsys, "compare", path, "--limit", "1300MiB")}
    assert (enough["recorded"], enough["planned"]) == (False, True)


def test_failure_names_operation_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frames = [
        {"name": "at::_ops::mm::call(at::Tensor const&)", "filename": "Ops.cpp", "line": 1},
        {"name": "forward", "filename": "/me/train.py", "line": 12},
    ]
    text = printed(capsys, "compare", died(tmp_path, frames=frames), "-a", "recorded")
    assert "at event 2 in mm, train.py:12, which asks for 900 MiB" in text


def test_failed_run_fits_no_further_than_its_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run might have asked for more after the request that failed."""
    text = printed(capsys, "compare", died(tmp_path), "--limit", "2GiB", "-a", "planned")
    assert "so far" in text
    assert " yes " not in text


def test_rounding_of_the_recorded_allocator_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A snapshot's events tell the bytes asked for, and no others."""
    path = window(tmp_path)
    rows = {row["allocator"]: row for row in answer(capsys, "compare", path)}
    parts = ("internal_fragmentation", "external_fragmentation")
    assert [rows["recorded"][part] for part in parts] == [None, None]
    assert all(rows["pytorch"][part] is not None for part in parts)
    assert "unknown" in printed(capsys, "compare", path, "-a", "recorded")
    assert "when most was reserved, rounding included" in printed(capsys, "info", path)


def test_recorded_failure_is_reported_without_a_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, "compare", died(tmp_path), "-a", "recorded", "-a", "planned")
    assert "recorded ran out of memory at event 2, which asks for 900 MiB" in text
    assert "peak load 400 MiB, 1.27 GiB with the requests that failed" in text


def test_private_pools_are_simulated_separately_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A graph's memory serves no other pool, so both pools' 300 MiB are necessary."""
    events = []
    for at, pool in enumerate([(0, 0), (0, 1)]):
        for k, what in enumerate(("segment_alloc", "alloc", "free_completed")):
            events.append(event(what, at << 40, 300 * MIB, 3 * at + k, pool_id=pool))
    held = [segment((at << 40, 300 * MIB, 0, "inactive")) | {"segment_pool_id": (0, at)} for at in range(2)]
    path = stored(tmp_path / "s", events, segments=held)
    rows = {row["allocator"]: row for row in answer(capsys, "compare", path)}
    for name in ("recorded", "pytorch", "planned", "planned_online"):
        assert rows[name]["peak_reserved_bytes"] == 600 * MIB
    assert "1 private pool of captured graphs" in printed(capsys, "info", path).splitlines()[0]


def test_ranges_are_phases_and_user_metadata_are_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The innermost open range counts; a range with an end only was open before."""
    notes = [("outer", "START", 0), ("inner", "START", 2), ("inner", "END", 4), ("old", "END", 4)]
    events = [event("alloc", at << 30, MIB, 2 * at + 1, user_metadata=f"layer{at % 2}") for at in range(4)]
    path = stored(
        tmp_path / "s",
        events,
        external_annotations=[{"name": n, "stage": s, "time_us": t, "device": 0} for n, s, t in notes],
    )
    [device] = answer(capsys, "info", path)["per_device"]
    assert {share["phase"]: share["buffers"] for share in device["phases"]} == {"outer": 3, "inner": 1}
    assert {share["module"]: share["buffers"] for share in device["modules"]} == {"layer0": 2, "layer1": 2}


def test_source_lines_are_reported_where_no_operation_is_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = [{"name": "f", "filename": "/me/model.py", "line": 42}]
    path = stored(tmp_path / "s", [event("alloc", 512, MIB, frames=frames)])
    [device] = answer(capsys, "info", path)["per_device"]
    assert device["frames"] == [{"frame": "model.py:42", "bytes": MIB, "buffers": 1}]


def test_iteration_and_whole_have_peak_loads_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parameters of 64 MiB stay; an iteration's buffers have 3 MiB."""
    rows = ["Thread,Time,Action,Pointer,Size,Stream", f"1,1.0,allocate,0x100000000,{64 * MIB},0"]
    for at in range(40):
        for k, (what, size) in enumerate(
            [("allocate", MIB), ("allocate", 2 * MIB), ("free", MIB), ("free", 2 * MIB)]
        ):
            address = 0x200000000 if size == MIB else 0x300000000
            rows.append(f"1,{2 + at}.{k},{what},{address:#x},{size},0")
    (tmp_path / "log.csv").write_text("\n".join(rows))
    shown = answer(capsys, "info", str(tmp_path / "log.csv"))
    assert shown["iterations"] >= 20
    loads = (
        shown["peak_load_bytes"],
        shown["iteration_peak_load_bytes"],
        shown["per_device"][0]["peak_load_bytes"],
    )
    assert loads == (67 * MIB, 3 * MIB, 67 * MIB)


def test_shared_profiler_trace_counts_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    path = shared("profiler_weights.json")
    shown = answer(capsys, "info", path)
    assert shown["peak_load_bytes"] == 3_196_059_648  # the largest `Total Allocated` of the file
    assert shown["per_device"][0]["recorded"]["peak_reserved_bytes"] == 3_217_031_168
    rows = answer(capsys, "compare", path, "--limit", "2GiB")
    assert rows[0]["allocator"] == "recorded"
    assert {row["fits"] for row in rows} == {False}


def test_shared_truncated_history_promises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    [device] = answer(capsys, "info", shared("ring.pickle"))["per_device"]
    assert (device["history"], device["reserved_before_bytes"]) == ("window", 10_485_760_000)
    assert device["remedies"] == []


def test_shared_snapshots_of_a_program_name_the_same_line_on_windows_and_linux(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("windows.pickle", "linux.pickle", "blockframes.pickle"):
        [device] = answer(capsys, "info", shared(name), "--frames")["per_device"]
        assert [share["frame"] for share in device["frames"]] == ["model.py:42"]


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("nohistory.pickle", {"history": "absent", "remedies": []}),
        ("list.pickle", {"history": "absent", "remedies": []}),
        ("rmm_fail.csv", {"history": "whole"}),
        ("rmm_docs.csv", {"history": "whole", "refused": None}),
        ("oom.pickle", {"history": "whole"}),
    ],
)
def test_shared_files_are_answered_with_their_missing_facts(
    name: str, facts: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    [device] = answer(capsys, "info", shared(name))["per_device"]
    assert {key: device[key] for key in facts} == facts
    failed = {"rmm_fail.csv": 99_999_999_999, "oom.pickle": 943_718_400}.get(name)
    assert (device["refused"] or {}).get("size_bytes") == failed


def test_shared_annotations_are_phases_and_modules(capsys: pytest.CaptureFixture[str]) -> None:
    [device] = answer(capsys, "info", shared("annotated.pickle"))["per_device"]
    assert {share["phase"]: share["buffers"] for share in device["phases"]} == {"forward": 20}
    assert sorted(share["module"] for share in device["modules"]) == [f"layer{at}.attn" for at in range(4)]


def test_shared_private_pools_need_the_recorded_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["allocator"]: row for row in answer(capsys, "compare", shared("pools.pickle"))}
    assert {rows[name]["peak_reserved_bytes"] for name in ("recorded", "pytorch", "planned")} == {600 * MIB}


def test_recorded_allocator_covers_devices_with_reserved_bytes_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A profiler's trace has no reserved bytes of the host: no reason to fail for the GPU."""
    events = []
    for at, (kind, index, total) in enumerate([(0, -1, 0), (1, 0, 8192)]):
        args = {"Total Reserved": total, "Total Allocated": total, "Bytes": 4096, "Addr": 512 * (at + 1)}
        args |= {"Device Type": kind, "Device Id": index}
        events.append({"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": at + 1, "args": args})
    (tmp_path / "t.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    rows = answer(capsys, "compare", str(tmp_path / "t.json"), "-a", "recorded", "-a", "planned")
    assert [(row["device"], row["allocator"]) for row in rows] == [
        (-1, "planned"),
        (0, "recorded"),
        (0, "planned"),
    ]


def test_simulations_are_reported_without_and_with_the_failed_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = died(tmp_path)
    [device] = answer(capsys, "info", path)["per_device"]
    rows = {row["allocator"]: row["peak_reserved_bytes"] for row in answer(capsys, "compare", path)}
    assert device["simulated"] == {
        "pool_bytes": 400 * MIB,
        "plan_bytes": 400 * MIB,
        "pool_bytes_with_refused": rows["planned_online"],
        "plan_bytes_with_refused": rows["planned"],
    }
    assert rows["planned"] == 1300 * MIB


@pytest.mark.parametrize("size", [2**62, 2**63 - 1, 2**64, -5, "x"])
@pytest.mark.parametrize("lenient", [[], ["--lenient"]])
def test_failure_counts_whatever_its_size(
    size: Any, lenient: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fact that memory ran out needs no size."""
    events = [event("segment_alloc", 0, 64 * MIB, 1), event("alloc", 0, 64 * MIB, 2)]
    refused = {"action": "oom", "size": size, "stream": 3, "time_us": 3, "frames": [], "device_free": 7}
    path = stored(tmp_path / "s", [*events, refused])
    row = answer(capsys, "compare", path, "--limit", "1GiB", "-a", "recorded", *lenient)[0]
    assert row["fits"] is False
    assert "out of memory: 1 request failed" in printed(capsys, "info", path, *lenient).splitlines()[0]


@pytest.mark.parametrize("size", ["18446744073709551615", "-1", "x"])
def test_failure_in_a_log_counts_whatever_its_size(
    size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["Thread,Time,Action,Pointer,Size,Stream", "1,1.0,allocate,0x100,64,0"]
    (tmp_path / "log.csv").write_text("\n".join([*rows, f"1,2.0,allocate failure,(nil),{size},0"]))
    [device] = answer(capsys, "info", str(tmp_path / "log.csv"))["per_device"]
    assert device["refused"]["count"] == 1


def test_ranges_of_threads_interleave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An end closes the latest open range of its name, whatever opened meanwhile."""
    notes = [("a", "START", 0), ("b", "START", 2), ("a", "END", 4), ("b", "END", 6)]
    events = [event("alloc", at << 30, MIB, 2 * at + 1) for at in range(4)]
    path = stored(
        tmp_path / "s",
        events,
        external_annotations=[{"name": n, "stage": s, "time_us": t, "device": 0} for n, s, t in notes],
    )
    [device] = answer(capsys, "info", path)["per_device"]
    phases = {share["phase"]: share["buffers"] for share in device["phases"]}
    assert phases == {"a": 1, "b": 2, None: 1}

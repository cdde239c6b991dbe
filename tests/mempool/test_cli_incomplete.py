"""Reports of incomplete recordings: the missing facts are named, and no claim depends on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from snapshots import event, segment, stored

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from answers import Cli

    Maker = Callable[[Path], None]

MIB = 1 << 20
FRAMES = [
    {"name": "at::_ops::mm::call(at::Tensor const&)", "filename": "Ops.cpp", "line": 1},
    {"name": "forward", "filename": "/me/train.py", "line": 12},
]
LOG = ["Thread,Time,Action,Pointer,Size,Stream", "1,1.0,allocate,0x100,64,0"]


def held(*sizes: int) -> list[dict[str, Any]]:
    """Segments of 1000 MiB, each with a buffer of this many bytes."""
    return [
        segment(
            (at << 40, size, size, "active_allocated"), ((at << 40) + size, 1000 * MIB - size, 0, "inactive")
        )
        for at, size in enumerate(sizes, 1)
    ]


def refused(size: Any, free: int = 7, frames: Any = ()) -> dict[str, Any]:
    return event("oom", 0, size, 3, device_free=free, frames=list(frames))


def without_history(path: Path) -> None:
    stored(path, [], segments=held(100 * MIB, 300 * MIB))


def ring_of_a_single_event(path: Path) -> None:
    """PyTorch keeps one event of `_record_memory_history(enabled="state")`."""
    stored(path, [event("free_completed", 9 << 40, 4, 1)], segments=held(100 * MIB))


def window(path: Path) -> None:
    """Ten allocs and frees of 100 MiB long after 2000 MiB were reserved."""
    events = [
        event(action, 3 << 40, 100 * MIB, 2 * at + k)
        for at in range(10)
        for k, action in enumerate(("alloc", "free_completed"))
    ]
    stored(
        path, events, segments=[*held(100 * MIB, 300 * MIB), segment((3 << 40, 1000 * MIB, 0, "inactive"))]
    )


def died(path: Path, frames: Any = FRAMES[1:]) -> None:
    """400 MiB are live when 900 MiB, then 50 MiB, are refused."""
    events = [event("segment_alloc", 0, 400 * MIB, 1), event("alloc", 0, 400 * MIB, 2)]
    failures = [refused(size * MIB, frames=frames) for size in (900, 50)]
    stored(path, [*events, *failures], segments=[segment((0, 400 * MIB, 400 * MIB, "active_allocated"))])


def died_in_mm(path: Path) -> None:
    died(path, FRAMES)


def small_request_with_free_memory(free: int) -> Maker:
    def make(path: Path) -> None:
        events = [event("segment_alloc", 0, MIB, 1), event("alloc", 0, MIB, 2)]
        stored(path, [*events, refused(50 * MIB, free)])

    return make


def two_pools(path: Path) -> None:
    """A graph's memory serves no other pool, so the 300 MiB of both pools are necessary."""
    events = [
        event(action, at << 40, 300 * MIB, 3 * at + k, pool_id=(0, at))
        for at in range(2)
        for k, action in enumerate(("segment_alloc", "alloc", "free_completed"))
    ]
    inactive = [
        segment((at << 40, 300 * MIB, 0, "inactive")) | {"segment_pool_id": (0, at)} for at in range(2)
    ]
    stored(path, events, segments=inactive)


def annotated(*ranges: tuple[str, str, int]) -> Maker:
    """Four allocs at times 1, 3, 5 and 7, in alternating layers, with named ranges."""

    def make(path: Path) -> None:
        events = [
            event("alloc", at << 30, MIB, 2 * at + 1, user_metadata=f"layer{at % 2}") for at in range(4)
        ]
        keys = ("name", "stage", "time_us")
        notes = [dict(zip(keys, values, strict=True)) | {"device": 0} for values in ranges]
        stored(path, events, external_annotations=notes)

    return make


def source_lines_only(path: Path) -> None:
    stored(path, [event("alloc", 512, MIB, frames=[{"name": "f", "filename": "/me/model.py", "line": 42}])])


LOST = "the first events are lost: 400 MiB were live, 2.93 GiB reserved before"
BEFORE = "recorded held more than 1 GiB before the first event that is recorded"
#: Recording, command, parts of the output, and parts that must be missing.
TEXTS: list[tuple[Maker, str, list[str], list[str]]] = [
    (without_history, "info s", ["history not recorded: only the state at the end is known", "400 MiB"],
     ["load over time", "up to"]),
    (window, "info s",
     [LOST, "in 3 or more calls to the driver", "when most was reserved, rounding included"], []),
    (without_history, "compare s", ["live at the end 400 MiB"], ["peak load"]),
    (without_history, "compare s --limit 1GiB -a recorded", [BEFORE], ["asks for"]),
    (window, "compare s --limit 1GiB -a recorded", [BEFORE], ["asks for"]),
    (without_history, "compare s --limit 80GiB -a pytorch", ["unknown"], [" yes "]),
    (window, "compare s --limit 80GiB -a pytorch", ["in window"], [" yes "]),
    (window, "compare s -a recorded", ["unknown"], []),
    (died, "info s",
     ["the largest for 900 MiB at train.py:12, with 400 MiB live, 7 B free on the device"], []),
    (died, "compare s -a recorded -a planned",
     ["recorded ran out of memory at event 2 in train.py:12, which asks for 900 MiB",
      "peak load 400 MiB, 1.27 GiB with the requests that failed"], []),
    (died, "compare s --limit 2GiB -a planned", ["so far"], [" yes "]),
    (died_in_mm, "compare s -a recorded", ["at event 2 in mm, train.py:12, which asks for 900 MiB"], []),
    (small_request_with_free_memory(400 * MIB), "info s", ["set_per_process_memory_fraction"], []),
    (small_request_with_free_memory(60 * MIB), "info s", [], ["set_per_process_memory_fraction"]),
    (small_request_with_free_memory(40 * MIB), "info s", [], ["set_per_process_memory_fraction"]),
    (two_pools, "info s", ["1 private pool of captured graphs"], []),
]  # fmt: skip


@pytest.mark.parametrize(("make", "command", "parts", "missing"), TEXTS)
def test_text_names_missing_facts_and_claims_nothing_beyond_them(
    make: Maker, command: str, parts: list[str], missing: list[str], tmp_path: Path,
    cli: Cli, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "s")
    text = cli.printed(*command.split())
    assert [part for part in parts if part not in text] == []
    assert [part for part in missing if part in text] == []


REFUSED = {
    "count": 2, "event": 2, "size_bytes": 900 * MIB, "live_bytes": 400 * MIB, "free_bytes": 7,
    "operation": None, "frame": "train.py:12",
}  # fmt: skip
SIMULATED = {
    "pool_bytes": 400 * MIB, "plan_bytes": 400 * MIB,
    "pool_bytes_with_refused": 1300 * MIB, "plan_bytes_with_refused": 1300 * MIB,
}  # fmt: skip
FACTS: list[tuple[Maker, dict[str, Any]]] = [
    (without_history, {"history": "absent", "remedies": [], "simulated": None}),
    (ring_of_a_single_event, {"history": "absent", "remedies": []}),
    (window, {"history": "window", "live_before_bytes": 400 * MIB, "reserved_before_bytes": 3000 * MIB}),
    (died, {"refused": REFUSED, "simulated": SIMULATED}),
    (source_lines_only, {"frames": [{"frame": "model.py:42", "bytes": MIB, "buffers": 1}]}),
]


@pytest.mark.parametrize(("make", "facts"), FACTS)
def test_facts_of_a_device_equal_its_recording(
    make: Maker, facts: dict[str, Any], tmp_path: Path, cli: Cli
) -> None:
    make(tmp_path / "s")
    [device] = cli.answer("info", tmp_path / "s")["per_device"]
    assert {key: device[key] for key in facts} == facts
    assert device["history"] != "window" or all(
        remedy["saves_bytes"] < 100 * MIB for remedy in device["remedies"]
    )


@pytest.mark.parametrize(
    ("ranges", "phases"),
    [
        # The innermost open range counts; a range with an end only was open before.
        ([("outer", "START", 0), ("inner", "START", 2), ("inner", "END", 4), ("old", "END", 4)],
         {"outer": 3, "inner": 1}),
        # An end closes the latest open range of its name, whatever opened meanwhile.
        ([("a", "START", 0), ("b", "START", 2), ("a", "END", 4), ("b", "END", 6)], {"a": 1, "b": 2, None: 1}),
    ],
)  # fmt: skip
def test_ranges_are_phases_and_user_metadata_are_modules(
    ranges: list[Any], phases: dict[str | None, int], tmp_path: Path, cli: Cli
) -> None:
    annotated(*ranges)(tmp_path / "s")
    [device] = cli.answer("info", tmp_path / "s")["per_device"]
    assert {share["phase"]: share["buffers"] for share in device["phases"]} == phases
    assert {share["module"]: share["buffers"] for share in device["modules"]} == {"layer0": 2, "layer1": 2}


@pytest.mark.parametrize("verb", ["plan", "swap"])
def test_plans_need_a_history_and_name_a_lost_beginning(verb: str, tmp_path: Path, cli: Cli) -> None:
    without_history(tmp_path / "s")
    assert "nothing to plan: history not recorded" in cli.error(verb, tmp_path / "s", code=3)
    window(tmp_path / "s")
    code = 0 if verb == "plan" else 3  # it has no accesses
    assert LOST[:45] in cli.run(verb, tmp_path / "s", code=code)[1]


def test_limit_is_exceeded_by_the_recorded_part_alone(tmp_path: Path, cli: Cli) -> None:
    for make in (without_history, window):
        make(tmp_path / "s")
        rows = cli.answer("compare", tmp_path / "s", "--limit 80GiB")
        assert {row["fits"] for row in rows} == {None}
        assert all(row["caveats"] for row in rows)
        rows = cli.answer("compare", tmp_path / "s", "--limit 50MiB")
        assert {row["fits"] for row in rows} == {False}


def by_allocator(cli: Cli, *command: str | Path) -> dict[str, dict[str, Any]]:
    return {row["allocator"]: row for row in cli.answer("compare", *command)}


def test_refused_requests_are_part_of_every_comparison(tmp_path: Path, cli: Cli) -> None:
    died(tmp_path / "s")
    assert cli.answer("info", tmp_path / "s")["refused"] == 2
    rows = by_allocator(cli, tmp_path / "s", "--limit", "1299MiB")
    assert {row["fits"] for row in rows.values()} == {False}
    assert rows["recorded"]["failed_at"]["recorded"] is True
    assert rows["planned"]["failed_at"]["frame"] == "train.py:12"
    loads = (rows["recorded"]["peak_load_bytes"], rows["planned"]["peak_load_bytes"])
    assert loads == (400 * MIB, 1300 * MIB)
    rows = by_allocator(cli, tmp_path / "s", "--limit", "1300MiB")
    assert (rows["recorded"]["fits"], rows["planned"]["fits"]) == (False, True)


def test_private_pools_are_simulated_separately(tmp_path: Path, cli: Cli) -> None:
    two_pools(tmp_path / "s")
    rows = by_allocator(cli, tmp_path / "s")
    names = ("recorded", "pytorch", "planned", "planned_online")
    assert {rows[name]["peak_reserved_bytes"] for name in names} == {600 * MIB}


def test_iteration_and_whole_have_peak_loads_of_their_own(tmp_path: Path, cli: Cli) -> None:
    """Parameters of 64 MiB stay; an iteration's buffers have 3 MiB."""
    rows = [LOG[0], f"1,1.0,allocate,0x100000000,{64 * MIB},0"]
    for at in range(40):
        for k, action in enumerate(("allocate", "allocate", "free", "free")):
            address, size = ((0x200000000, MIB), (0x300000000, 2 * MIB))[k % 2]
            rows.append(f"1,{2 + at}.{k},{action},{address:#x},{size},0")
    (tmp_path / "log.csv").write_text("\n".join(rows))
    shown = cli.answer("info", tmp_path / "log.csv")
    assert shown["iterations"] >= 20
    loads = [shown["peak_load_bytes"], shown["iteration_peak_load_bytes"]]
    assert [*loads, shown["per_device"][0]["peak_load_bytes"]] == [67 * MIB, 3 * MIB, 67 * MIB]


@pytest.mark.parametrize("lenient", ["", "--lenient"])
@pytest.mark.parametrize("size", [2**62, 2**63 - 1, 2**64, -5, "x"])
def test_failure_counts_whatever_its_size(size: Any, lenient: str, tmp_path: Path, cli: Cli) -> None:
    events = [event("segment_alloc", 0, 64 * MIB, 1), event("alloc", 0, 64 * MIB, 2)]
    stored(tmp_path / "s", [*events, refused(size)])
    [row] = cli.answer("compare", tmp_path / "s", "--limit 1GiB -a recorded", lenient)
    assert row["fits"] is False
    first = cli.printed("info", tmp_path / "s", lenient).splitlines()[0]
    assert "out of memory: 1 request failed" in first
    (tmp_path / "log.csv").write_text("\n".join([*LOG, f"1,2.0,allocate failure,(nil),{size},0"]))
    [device] = cli.answer("info", tmp_path / "log.csv")["per_device"]
    assert device["refused"]["count"] == 1

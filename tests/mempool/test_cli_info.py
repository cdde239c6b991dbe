"""``mempool info`` on where memory goes, on several devices, and on the main part of a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answers import Cli

from solvers import read_plan
from traces import EventType, Trace
from traces.formats.parquet import write_trace
from traces.trace import COLUMNS
from traces.workload import generate

A, F, R, W, M, RESERVE, *_ = EventType
KIB = 1024


def training_with_accesses(iterations: int = 6) -> Trace:
    """A trace of a parameter, an output kept for an iteration, and two temporary buffers, one freed late."""
    rows: list[tuple[int, int, int, int, int]] = [(RESERVE, -1, 512 * KIB, 0, -1), (A, 0, 40 * KIB, 0, 0)]
    output = -1
    for step in range(iterations):
        first = 1 + 3 * step
        rows.append((M, -1, 0, -1, 4))
        rows.append((A, first, 100 * KIB, 64 * KIB, 1))
        rows.append((W, first, 0, -1, -1))
        rows.append((A, first + 1, 200 * KIB, 200 * KIB, 2))
        rows.append((F, first, 0, -1, -1))
        rows.append((A, first + 2, 8 * KIB, (480 + 8 * (step % 2)) * KIB, 3))
        rows.append((R, first + 1, 0, -1, -1))
        rows.append((F, first + 1, 0, -1, -1))
        if output >= 0:
            rows.append((F, output, 0, -1, -1))
        output = first + 2
    kind, buffer, size, address, operation = np.array(rows).T
    names = ["parameter", "mm", "gelu", "output", "step", "a.py:1", "b.py:2"]
    frame = np.where(operation == 1, 5, np.where(operation == 2, 6, -1))
    return Trace.of(
        kind, buffer, size, address=address, operation=operation, frame=frame, names=names,
        metadata={"alignment": "512"},
    )  # fmt: skip


def per_device(cli: Cli, *options: str) -> dict[str, Any]:
    [device] = cli.answer("info t.trace", *options)["per_device"]
    return dict(device)


@pytest.fixture
def trace_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    monkeypatch.chdir(tmp_path)
    made = training_with_accesses()
    write_trace(made, "t.trace")
    return made


def test_memory_at_the_peak_is_reported_with_its_remedies(trace_file: Trace, cli: Cli) -> None:
    """Both the JSON object and the text report it; segments of the recorded allocator are no requests."""
    assert cli.answer("info t.trace")["requested_bytes"] == (40 + 6 * (100 + 200 + 8)) * KIB
    said = per_device(cli)
    assert said["peak_load_bytes"] == int(trace_file.load().max()) == 348 * KIB
    roles = {"persistent": 40 * KIB, "wrap_around": 8 * KIB, "passing": 300 * KIB, "to_the_end": 0}
    assert said["roles"] == roles
    operations = [(share["operation"], share["bytes"] // KIB) for share in said["operations"]]
    assert operations == [("gelu", 200), ("mm", 100), ("parameter", 40), ("output", 8)]
    assert said["held_longest"][0]["role"] == "persistent"
    assert said["held_longest"][0]["end"] == len(trace_file)
    assert said["peak_phase"] is None is said["peak_module"]
    assert not {"categories", "phases", "modules"} & said.keys()  # not recorded
    assert said["recorded"]["peak_reserved_bytes"] == 512 * KIB
    assert said["recorded"]["driver_calls"] == 1
    saves = {remedy["name"]: remedy["saves_bytes"] for remedy in said["remedies"]}
    assert saves["fragmentation"] == (512 - 348) * KIB
    assert saves["free_earlier"] == 100 * KIB + 40 * KIB + 8 * KIB  # written before the peak, never read
    assert list(saves.values()) == sorted(saves.values(), reverse=True)
    text = cli.printed("info t.trace")
    parts = (
        "where memory goes on device 0",
        "at the peak by operation",
        "gelu",
        "what would help",
        "stranded",
    )
    assert [part for part in parts if part not in text] == []


def test_recorded_categories_modules_and_phases_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["parameters", "activations", "Net", "Net.head", "forward", "backward", "mm"]
    kind, buffer, size, operation, module, category = np.array(
        [
            (A, 0, 100 * KIB, -1, 2, 0),
            (M, -1, 0, 4, -1, -1),
            (A, 1, 60 * KIB, 6, 3, 1),
            (A, 2, 1 * KIB, 6, 3, 1),
            (F, 2, 0, -1, -1, -1),
            (M, -1, 0, 5, -1, -1),
            (A, 3, 30 * KIB, 6, 3, -1),
            (F, 1, 0, -1, -1, -1),
        ]
    ).T
    made = Trace.of(kind, buffer, size, operation=operation, module=module, category=category, names=names)
    write_trace(made, "t.trace")
    said = per_device(cli)
    assert (said["peak_phase"], said["peak_module"]) == ("backward", "Net.head")
    told = {
        name: {share[name]: share["bytes"] // KIB for share in said[plural]}
        for plural, name in (("categories", "category"), ("phases", "phase"), ("modules", "module"))
    }
    assert told == {
        "category": {"parameters": 100, "activations": 60, None: 30},
        "phase": {None: 100, "forward": 60, "backward": 30},
        "module": {"Net": 100, "Net.head": 90},
    }
    text = cli.printed("info t.trace")
    assert "backward of Net.head" in text
    for part in ("by category", "by phase", "by module"):
        assert f"at the peak {part}" in text


def doubled(single: Trace, second: int) -> Trace:
    """Return the trace doubled onto two devices; buffers of the second device are half as large."""
    table = {name: np.repeat(getattr(single, name), 2) for name in COLUMNS}
    other = np.arange(2 * len(single)) % 2 == 1
    of_buffer = table["kind"] != EventType.MARK
    table["device"] = np.where(other, second, 0).astype(np.int32)
    table["buffer"] = np.where(of_buffer, 2 * table["buffer"] + other, -1)
    table["size"] = np.where(other, table["size"] // 2, table["size"])
    keep = of_buffer | ~other
    return Trace.of(**{name: values[keep] for name, values in table.items()}, names=single.names)


@pytest.fixture
def single(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    monkeypatch.chdir(tmp_path)
    made = generate(60, 1)
    write_trace(made, "single.trace")
    write_trace(doubled(made, 3), "two.trace")
    write_trace(doubled(made, -1), "host.trace")
    return made


@pytest.mark.parametrize("whole", ["", "--whole"])
def test_plan_of_a_device_equals_the_plan_of_its_own_trace(single: Trace, whole: str, cli: Cli) -> None:
    alone = cli.answer("plan single.trace -o single.plan", whole)
    planned = cli.answer("plan two.trace --device 0 -o two.plan", whole)
    for key in ("arena_bytes", "peak_load_bytes", "buffers", "period", "iterations"):
        assert planned[key] == alone[key]
    assert (read_plan("two.plan")[1].size == read_plan("single.plan")[1].size).all()
    assert cli.answer("check two.plan two.trace --device 0")["ok"]
    cli.run("check two.plan two.trace --device 3", code=1)


def test_several_devices_without_a_choice_are_refused(single: Trace, cli: Cli) -> None:
    """An error line names the devices and the option; no file is written."""
    cli.run("plan single.trace -o single.plan")
    for command in ("plan two.trace -o two.plan", "check single.plan two.trace"):
        error = cli.error(command, code=2)
        assert "two.trace is of several devices: 0, 3; choose one with --device" in error
    for verb in ("plan", "info"):
        assert "has no device 1, but 0, 3" in cli.error(verb, "two.trace --device 1", code=2)


def test_info_shows_the_device_with_the_largest_peak_load_and_where_all_go(single: Trace, cli: Cli) -> None:
    alone, both = cli.answer("info single.trace"), cli.answer("info two.trace")
    for key in ("peak_load_bytes", "lower_bound_bytes", "buffers", "period", "iterations"):
        assert both[key] == alone[key]
    assert (alone["device"], both["device"], both["devices"]) == (0, 0, 2)
    assert both["allocs"] == 2 * alone["allocs"]
    assert [device["device"] for device in both["per_device"]] == [0, 3]
    assert both["per_device"][0]["roles"] == alone["per_device"][0]["roles"]
    host = cli.answer("info host.trace --device -1")
    assert (host["device"], host["buffers"]) == (-1, alone["buffers"])
    assert [device["device"] for device in host["per_device"]] == [-1]
    assert "0; the figures below are of this device" in cli.printed("info two.trace")


def test_event_numbers_are_rows_of_the_file(single: Trace, cli: Cli) -> None:
    """Events of the peak, and of the buffers held longest."""
    two = doubled(single, 3)
    for device in cli.answer("info two.trace")["per_device"]:
        load = np.where((two.device == device["device"]) & (two.kind == EventType.ALLOC), two.size, 0)
        frees = np.flatnonzero((two.device == device["device"]) & (two.kind == EventType.FREE))
        load[frees] = -two.size[two.births[frees]]
        assert device["peak_event"] == np.cumsum(load).argmax()
        for held in device["held_longest"]:
            assert two.buffer[held["start"]] == held["buffer"]
            assert held["end"] == len(two) or two.buffer[held["end"]] == held["buffer"]


def recorded(before: list[int], times: int, *, freed: bool = True, mark: bool = False) -> Trace:
    """Return a trace of various allocs, followed by ten equal allocs repeated ``times`` times."""
    rows: list[tuple[int, int, int]] = []
    buffer = 0
    for size in before:
        rows.append((A, buffer, size))
        if freed:
            rows.append((F, buffer, 0))
        buffer += 1
    for _ in range(times):
        if mark:
            rows.append((M, -1, 0))
        rows += [(A, buffer + k, (k + 1) * 1024) for k in range(10)]
        rows += [(F, buffer + k, 0) for k in range(10)]
        buffer += 10
    kind, ids, size = zip(*rows, strict=True)
    return Trace.of(kind, ids, size)


few = [1000 + 8 * k for k in range(20)]
many = [1000 + 8 * k for k in range(500)]


@pytest.mark.parametrize(
    ("trace", "iterations"),
    [
        (recorded(few, 40), 39),
        (recorded([*few, 60 * 1024], 40), 39),
        (recorded(many, 40), 1),  # less than half of the allocs
        (recorded([(40 << 10) + 8 * k for k in range(100)], 40), 1),  # of the bytes
        (recorded([200 * 1024], 40), 1),  # of the peak load
        (recorded([200 * 1024], 40, freed=False), 39),  # which it reaches with what stays
        (recorded(many, 40, mark=True), 39),  # marks are trusted
    ],
)
def test_iterations_must_be_the_main_part_of_a_trace(
    trace: Trace, iterations: int, tmp_path: Path, cli: Cli
) -> None:
    path = str(tmp_path / "t.trace")
    write_trace(trace, path)
    shown = cli.answer("info", path)
    assert shown["iterations"] == iterations
    assert cli.answer(f"plan {path} -o {path}.plan")["iterations"] == iterations
    assert cli.answer(f"check {path}.plan {path}")["ok"]
    assert (shown["period"] is None) == (shown["per_device"][0]["roles"] is None) == (iterations == 1)
    text = " ".join(cli.printed("info", path).split())
    assert ("alike, are a small part; the figures below are of the whole trace" in text) == (iterations == 1)
    for output in ("", f"-o {path}.plan"):
        text = " ".join(cli.printed("plan", path, output).split())
        assert ("alike, are a small part" in text) == (iterations == 1)
        assert ("replayed by no pool" in text) == (iterations == 1 and bool(output))

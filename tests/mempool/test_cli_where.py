"""Tests of the ``mempool info`` report on memory: roles, operations, losses, remedies."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from answers import answer, printed

from mempool.cli.app import call
from traces import EventType, Trace
from traces.formats.parquet import write_trace
from traces.trace import COLUMNS

if TYPE_CHECKING:
    from pathlib import Path

A, F, R, W, M, RESERVE, *_ = EventType
KIB = 1024


def training(iterations: int = 6) -> Trace:
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


def per_device(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    [device] = answer(capsys, "info", "t.trace", *options)["per_device"]
    return dict(device)


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    monkeypatch.chdir(tmp_path)
    made = training()
    write_trace(made, "t.trace")
    return made


def test_peak_is_reported_by_role_and_by_operation(trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    said = per_device(capsys)
    peak = int(trace.load().max())
    assert said["peak_load_bytes"] == peak == 348 * KIB
    roles = {"persistent": 40 * KIB, "wrap_around": 8 * KIB, "passing": 300 * KIB, "to_the_end": 0}
    assert said["roles"] == roles
    assert [(share["operation"], share["bytes"]) for share in said["operations"]] == [
        ("gelu", 200 * KIB),
        ("mm", 100 * KIB),
        ("parameter", 40 * KIB),
        ("output", 8 * KIB),
    ]
    assert said["held_longest"][0]["role"] == "persistent"
    assert said["held_longest"][0]["end"] == len(trace)


def test_requested_bytes_do_not_count_recorded_segments(
    trace: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Segments of the recorded allocator are no requests."""
    assert answer(capsys, "info", "t.trace")["requested_bytes"] == (40 + 6 * (100 + 200 + 8)) * KIB


def test_roles_are_reported_only_with_iterations(trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    said = per_device(capsys, "--whole")
    assert said["roles"] is None
    assert "role" not in said["held_longest"][0]
    assert "passing" not in printed(capsys, "info", "t.trace", "--whole")


def test_reserved_bytes_and_remedies_are_reported(trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    said = per_device(capsys)
    assert said["recorded"]["peak_reserved_bytes"] == 512 * KIB
    assert said["recorded"]["driver_calls"] == 1
    saves = {remedy["name"]: remedy["saves_bytes"] for remedy in said["remedies"]}
    assert saves["fragmentation"] == (512 - 348) * KIB
    assert saves["free_earlier"] == 100 * KIB + 40 * KIB + 8 * KIB  # written before the peak, never read
    assert list(saves.values()) == sorted(saves.values(), reverse=True)


def test_idle_memory_is_reported_where_accesses_were_recorded(
    trace: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Late: the parameter, an output and a buffer only written; idle: for at least an iteration."""
    said = per_device(capsys)
    assert said["idle_bytes"] == (40 + 8 + 100 + 200) * KIB  # an iteration is eight events long
    assert said["late_bytes"] == (40 + 8 + 100) * KIB
    assert call(["info", "t.trace"]) == 0
    assert "148 KiB last used before" in " ".join(capsys.readouterr().out.split())
    assert per_device(capsys, "--whole")["idle_bytes"] == (40 + 8) * KIB  # a tenth of all is five events
    silent = trace.kind != R
    silent &= trace.kind != W
    told = {name: getattr(trace, name)[silent] for name in COLUMNS}
    write_trace(dataclasses.replace(trace, **told), "t.trace")
    assert (said := per_device(capsys))["idle_bytes"] is None is said["late_bytes"]
    assert "idle" not in printed(capsys, "info", "t.trace")


def test_memory_report_is_printed_as_text(trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "info", "t.trace")
    for part in (
        "where memory goes on device 0",
        "at the peak by operation",
        "gelu",
        "what would help",
        "stranded",
    ):
        assert part in text


def test_recorded_categories_modules_and_phases_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    said = per_device(capsys)
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
    text = printed(capsys, "info", "t.trace")
    assert "backward of Net.head" in text
    for part in ("by category", "by phase", "by module"):
        assert f"at the peak {part}" in text


def test_unrecorded_categories_and_phases_are_not_reported(
    trace: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    said = per_device(capsys)
    assert said["peak_phase"] is None is said["peak_module"]
    assert not {"categories", "phases", "modules"} & said.keys()


def test_info_of_a_plan_has_no_memory_report(trace: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["plan", "t.trace", "-o", "t.plan", "--json"]) == 0
    capsys.readouterr()
    assert call(["info", "t.plan", "--json"]) == 0
    assert "per_device" not in json.loads(capsys.readouterr().out)

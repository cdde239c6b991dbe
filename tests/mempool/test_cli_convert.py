"""``mempool convert``: snapshots and traces in other formats, and snapshots wherever a trace is read."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mempool.cli.app import call
from traces import buffers_of
from traces.minimalloc import read_csv
from traces.parquet import read_trace, write_trace
from traces.snapshot import read_snapshot
from traces.workload import generate

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with a trace and a snapshot."""
    monkeypatch.chdir(tmp_path)
    write_trace(generate(60, 1), "t.trace")
    events: list[dict[str, Any]] = [
        {"action": action, "addr": addr, "size": 100, "stream": 0, "time_us": at, "frames": []}
        for at, (action, addr) in enumerate([("alloc", 512), ("alloc", 1024), ("free_completed", 512)])
    ]
    data = {"segments": [], "device_traces": [events]}
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(data, 4))
    return tmp_path


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_a_snapshot_becomes_a_trace_with_its_addresses(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["convert", "s.pickle", "s.trace", "--json"]) == 0
    answer = said(capsys)
    assert (answer["format"], answer["events"], answer["buffers"]) == ("trace", 3, 2)
    back, given = read_trace("s.trace"), read_snapshot("s.pickle")
    for name in ("kind", "buffer", "size", "time_ns", "address"):
        np.testing.assert_array_equal(getattr(back, name), getattr(given, name))
    assert back.metadata == given.metadata


def test_a_trace_becomes_a_csv_of_all_its_buffers(folder: Path) -> None:
    assert call(["convert", "t.trace", "b.csv"]) == 0
    buffers, back = buffers_of(read_trace("t.trace")), read_csv("b.csv")
    for name in ("start", "end", "size", "alignment"):
        np.testing.assert_array_equal(getattr(back, name), getattr(buffers, name))


def test_what_has_no_events_is_not_converted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["convert", "t.trace", "b.csv"]) == 0
    assert call(["convert", "b.csv", "c.trace"]) == 3
    assert "b.csv: a csv, which has no events" in capsys.readouterr().err
    assert not (folder / "c.trace").exists()


def test_snapshots_are_planned_and_looked_at_as_traces_are(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["info", "s.pickle", "--json"]) == 0
    assert said(capsys)["peak_load_bytes"] == 200
    assert call(["plan", "s.pickle", "-o", "s.plan", "--json"]) == 0
    assert said(capsys)["arena_bytes"] == 512 + 100
    assert call(["check", "s.plan", "s.pickle"]) == 0


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["convert", "--help"]) == 0
    assert "mempool convert" in capsys.readouterr().out.split("For example")[1]

"""``mempool convert``: traces in other formats, and every format wherever a trace is read."""

from __future__ import annotations

import gzip
import json
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from answers import answer

from mempool.cli.app import call
from traces import Trace, buffers_of
from traces.formats.minimalloc import read_csv
from traces.formats.parquet import read_trace, write_trace
from traces.formats.snapshot import read_snapshot
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


def test_snapshot_becomes_a_trace_with_its_addresses(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    converted = answer(capsys, "convert", "s.pickle", "s.trace")
    assert (converted["format"], converted["events"], converted["buffers"]) == ("trace", 3, 2)
    back, given = read_trace("s.trace"), read_snapshot("s.pickle")
    for name in ("kind", "buffer", "size", "time_ns", "address"):
        np.testing.assert_array_equal(getattr(back, name), getattr(given, name))
    assert back.metadata == given.metadata


def test_trace_becomes_a_csv_of_all_its_buffers(folder: Path) -> None:
    assert call(["convert", "t.trace", "b.csv"]) == 0
    buffers, back = buffers_of(read_trace("t.trace")), read_csv("b.csv")
    for name in ("start", "end", "size", "alignment"):
        np.testing.assert_array_equal(getattr(back, name), getattr(buffers, name))


RMM = """\
Thread,Time,Action,Pointer,Size,Stream
7,00:00:01.0,allocate,0x200,100,0
7,00:00:02.0,allocate,0x200,999,0
7,00:00:03.0,free,0x400,300,0
7,00:00:03.0,free,0x4
"""
CUPY = """\
hello
{"hook":"alloc","device_id":0,"mem_size":512,"mem_ptr":512}
{"hook":"malloc","device_id":0,"size":24,"mem_size":512,"mem_ptr":512,"pmem_id":"0x7f"}
"""


def profiled(*events: tuple[float, int, int]) -> str:
    names = ("Bytes", "Addr", "Device Type", "Device Id")
    told = [
        {
            "ph": "i",
            "name": "[memory]",
            "ts": ts,
            "pid": 1,
            "tid": 1,
            "args": dict(zip(names, (size, address, 0, -1), strict=True)),
        }
        for ts, address, size in events
    ]
    line = {
        "ph": "X",
        "cat": "python_function",
        "name": "/home/me/secret/train.py(7): step",
        "ts": 0,
        "dur": 99,
    }
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::empty", "ts": 0, "dur": 99}
    spans = [{**span, "pid": 1, "tid": 1} for span in (line, operator)]
    return json.dumps({"traceEvents": [*spans, *told]})


@pytest.fixture
def files(folder: Path) -> Path:
    """The folder with a contradictory log of RMM, CuPy's lines and a packed profiler's trace."""
    (folder / "rmm.csv").write_text(RMM)
    (folder / "cupy.log").write_text(CUPY)
    (folder / "profile.json.gz").write_bytes(gzip.compress(profiled((1, 64, 500), (2, 64, -500)).encode()))
    return folder


def test_every_format_is_read_by_every_verb(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The verbs inspect, convert and plan each file, and check the plan."""
    for source, peak in (("cupy.log", 24), ("profile.json.gz", 500), ("s.pickle", 200)):
        assert answer(capsys, "info", source)["peak_load_bytes"] == peak
        assert answer(capsys, "convert", source, "x.trace")["events"] == len(read_trace("x.trace"))
        assert call(["plan", source, "-o", "x.plan"]) == 0
        assert call(["check", "x.plan", "x.trace"]) == 0
        assert call(["check", "x.plan", source]) == 0
        assert call(["compare", source, "-a", "first_fit"]) == 0
        capsys.readouterr()


def test_impossible_events_stop_a_verb_or_are_left_out_and_counted(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names the first; with --lenient one line, and the JSON, count them by reason."""
    assert call(["info", "rmm.csv"]) == 3
    assert capsys.readouterr().err == (
        "mempool: rmm.csv, row 3: allocated again without a free: address 0x200\n"
    )
    reasons = {"allocated again without a free": 1, "not 6 fields": 1}
    for verb in (
        ["info", "rmm.csv"],
        ["convert", "rmm.csv", "x.trace"],
        ["convert", "rmm.csv", "x.csv"],
        ["plan", "rmm.csv", "-o", "x.plan"],
        ["check", "x.plan", "rmm.csv"],
        ["compare", "rmm.csv", "-a", "first_fit"],
    ):
        assert call([*verb, "--lenient", "--json"]) == 0
        done = capsys.readouterr()
        answer = json.loads(done.out)
        assert (answer[0] if verb[0] == "compare" else answer)["skipped"] == reasons
        first, *caveats = done.err.splitlines()
        assert first == (
            "mempool: rmm.csv: 2 events left out: 1 allocated again without a free, 1 not 6 fields"
        )
        assert len(caveats) == (verb[0] == "plan")  # of a buffer that is older than the log
    assert read_trace("x.trace").load().tolist() == [300, 400, 100]


def test_lenient_reading_of_valid_files_reports_nothing(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in ("cupy.log", "t.trace", "profile.json.gz"):
        assert call(["info", source, "--lenient", "--json"]) == 0
        done = capsys.readouterr()
        assert (json.loads(done.out)["skipped"], done.err) == ({}, "")
        assert answer(capsys, "info", source)["skipped"] is None


def test_source_lines_are_left_out_unless_requested(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both in reports and in converted traces; folders are left out of reports always."""
    for source, line in (("profile.json.gz", "train.py:7"), ("folders.trace", "deep.py:3")):
        if source == "folders.trace":
            names = ["/home/me/secret/deep.py:3", "C:\\secret\\deep.py:3", "aten::empty"]
            names.append("/home/me/secret/deep.py:3 f\n/home/me/secret/main.py:9 g")
            told = Trace.of(
                [0, 0], [0, 1], [8, 16], frame=[0, 1], operation=[2, 2], stack=[3, 3], names=names
            )
            write_trace(told, source)
        for how, shown in (([], False), (["--frames"], True)):
            assert call(["info", source, *how]) == 0
            assert call(["info", source, "--json", *how]) == 0
            out = capsys.readouterr().out
            assert "secret" not in out
            assert "aten::empty" in out
            assert (line in out) == shown
            assert call(["convert", source, "x.trace", *how]) == 0
            assert any(line in name for name in read_trace("x.trace").names) == shown
            assert (line.encode() in (files / "x.trace").read_bytes()) == shown
            assert shown or b"secret" not in (files / "x.trace").read_bytes()
            assert "aten::empty" in read_trace("x.trace").names
            capsys.readouterr()


def test_log_is_converted_in_pieces(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that reads a whole log is not called: a log may be larger than memory."""
    monkeypatch.setattr("traces.read.read", None)
    assert call(["convert", "rmm.csv", "x.trace", "--lenient"]) == 0
    assert call(["convert", "cupy.log", "y.trace"]) == 0
    assert read_trace("y.trace").metadata["framework"] == "cupy"


def test_converted_csv_has_the_plan_of_its_trace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A CSV made of a trace becomes a trace with the same plan."""
    assert call(["convert", "t.trace", "b.csv"]) == 0
    assert call(["convert", "b.csv", "c.trace"]) == 0
    arenas = []
    for source in ("b.csv", "c.trace", "t.trace"):
        capsys.readouterr()
        arenas.append(answer(capsys, "plan", source, "--whole")["arena_bytes"])
    assert len(set(arenas)) == 1
    [row] = answer(capsys, "compare", "b.csv", "-a", "best_fit")
    assert row["peak_load_bytes"] == read_trace("t.trace").load().max()


def test_suffix_decides_between_a_csv_and_a_trace(folder: Path) -> None:
    for target in ("x.trace", "x.parquet", "x", "x.csv", "x.v1.2"):
        assert call(["convert", "s.pickle", target]) == 0

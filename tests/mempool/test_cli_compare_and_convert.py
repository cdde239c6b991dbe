"""``mempool compare`` and ``convert``: every format in every verb, a table a trace, an error a bad file."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answers import answer, printed
from commands import COMMAND
from simulations import random_trace

from mempool.cli.app import call
from mempool.simulate import ALLOCATORS
from traces import EventType, Trace, buffers_of
from traces.formats.minimalloc import read_csv
from traces.formats.parquet import read_trace, write_trace
from traces.formats.snapshot import read_snapshot
from traces.workload import generate

TWO = ["-a", "first_fit", "-a", "best_fit:growth_bytes=4MiB"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with the traces of two ranks."""
    monkeypatch.chdir(tmp_path)
    for rank in range(2):
        (tmp_path / f"run{rank}").mkdir()
        write_trace(random_trace(rank, 300 + 200 * rank), f"run{rank}/rank.trace")
    return tmp_path


def test_every_allocator_has_a_row_with_complete_json_fields(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = answer(capsys, "compare", "run0/rank.trace")
    assert [row["allocator"] for row in rows] == list(ALLOCATORS)
    for row in rows:
        assert row["file"] == "run0/rank.trace"
        assert row["fits"] is None
        assert row["peak_reserved_bytes"] >= row["peak_live_bytes"] > 0
        assert 0 <= row["fragmentation"] < 1
        assert row["driver_calls"] > 0


def test_limit_names_the_allocators_running_out_and_their_events(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = answer(capsys, "compare", "run0/rank.trace", *TWO, "--limit", "1GiB")
    assert {row["fits"] for row in rows} == {True}
    limit = rows[0]["peak_load_bytes"] // 2
    text = printed(capsys, "compare", "run0/rank.trace", *TWO, "--limit", str(limit))
    assert "first_fit runs out of" in text
    assert "best_fit:growth_bytes=4194304 runs out of" in text


def test_patterns_stand_for_their_files_and_the_worst_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = answer(capsys, "compare", "run*/rank.trace", "run0/rank.trace", *TWO)
    files = ["run0/rank.trace", "run1/rank.trace"]
    assert [(row["file"], row["allocator"]) for row in rows] == [
        (file, name) for file in files for name in ("first_fit", "best_fit")
    ]
    worst = max(rows[::2], key=lambda row: row["peak_reserved_bytes"])["file"]
    summary = printed(capsys, "compare", "run*/rank.trace", *TWO).split("all files")[1]
    line = next(line for line in summary.splitlines() if "first_fit" in line)
    assert f"{worst}, device 0" in line


def test_bad_file_is_reported_and_the_other_files_are_compared(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.trace").write_bytes(b"nothing")
    assert call(["compare", "bad.trace", "run0/rank.trace", "gone.trace", "-a", "first_fit", "--json"]) == 3
    output = capsys.readouterr()
    told = {row["file"]: row["error"] for row in json.loads(output.out)}
    assert told.pop("run0/rank.trace") is None
    assert sorted(told) == ["bad.trace", "gone.trace"]
    assert all(told.values())
    errors = sorted(output.err.splitlines())
    assert len(errors) == 2
    assert errors[0].startswith("mempool: bad.trace: neither a trace")
    assert errors[1] == "mempool: gone.trace: No such file or directory"


def test_error_of_an_allocator_does_not_disturb_the_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["compare", "run0/rank.trace", "-a", "bfc:allow_growth=false", "-a", "cupy", "--json"]) == 2
    output = capsys.readouterr()
    bfc, cupy = json.loads(output.out)
    assert bfc.keys() == cupy.keys()
    assert (bfc["peak_reserved_bytes"], cupy["error"]) == (None, None)
    assert output.err == f"mempool: run0/rank.trace: bfc:allow_growth=False: {bfc['error']}\n"
    limited = ["-a", "bfc:allow_growth=false", "--limit", "600KiB"]
    [row] = answer(capsys, "compare", "run0/rank.trace", *limited)
    assert row["fits"] is False
    assert 0 < row["peak_reserved_bytes"] <= 600 << 10


def test_allocator_may_run_out_of_its_own_limit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "compare", "run0/rank.trace", "-a", "cnmem:grows=false", "-a", "cupy")
    assert "cnmem:grows=False runs out of what its settings allow at event " in text
    rows = answer(capsys, "compare", "run0/rank.trace", "-a", "cnmem:grows=false", "-a", "cupy")
    assert [row["fits"] for row in rows] == [False, None]


def test_names_are_shown_as_plain_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = Trace.of([EventType.ALLOC], [0], [4096], operation=[0], names=["[/bold]\ud800"])
    file = "odd [name] x.trace"
    write_trace(trace, file)
    text = printed(capsys, "compare", file, "-a", "cupy", "--limit", "512")
    assert f"{file}, device 0" in text
    assert "in [/bold]\\ud800, which asks" in text


def test_trace_without_allocations_is_reported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(Trace.of([EventType.MARK], [-1]), "marks.trace")
    assert call(["compare", "marks.trace"]) == 0
    assert capsys.readouterr().out == "marks.trace: no allocations\n"


def test_long_name_is_whole_without_a_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = printed(capsys, "compare", "run0/rank.trace", "run1/rank.trace")
    assert tables.count("pytorch_expandable") == 3
    assert tables.count("cnmem_first_block") == 3


def test_worker_processes_end_with_their_parent_and_with_ctrl_c(folder: Path) -> None:
    """However the parent ends, no worker goes on."""
    write_trace(random_trace(5, 60_000), "large.trace")
    for k in range(12):
        (folder / f"l{k}.trace").write_bytes((folder / "large.trace").read_bytes())
    for number, code in (
        (signal.SIGKILL, -signal.SIGKILL),
        (signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGINT, 130),
    ):
        begun = subprocess.Popen(
            [COMMAND, "compare", *(f"l{k}.trace" for k in range(12))],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        until = time.monotonic() + 60
        while len(members(begun.pid)) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(begun.pid, number)
        assert begun.wait(60) == code
        while members(begun.pid) and time.monotonic() < until:
            time.sleep(0.05)
        assert not members(begun.pid)


def members(session: int) -> list[int]:
    """Return the running processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # Dask's own, of its versions and of ports in use
def test_dask_cluster_gives_the_same_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    distributed = pytest.importorskip("distributed")
    files = [str(folder / f"run{rank}" / "rank.trace") for rank in range(2)] + ["gone.trace"]
    here = answer(capsys, "compare", *files, *TWO, code=3)
    with distributed.LocalCluster(1, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        there = answer(capsys, "compare", *files, *TWO, "--dask", cluster.scheduler_address, code=3)
    for row in (*here, *there):
        row["seconds"] = 0
    assert there == here


def test_missing_dask_scheduler_is_a_single_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("distributed")
    assert call(["compare", "run0/rank.trace", "--dask", "nonsense"]) == 4
    error = capsys.readouterr().err
    assert "no Dask scheduler at nonsense" in error
    assert error.count("\n") == 1


@pytest.fixture
def convert_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current convert_folder with a trace and a snapshot."""
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
    convert_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    converted = answer(capsys, "convert", "s.pickle", "s.trace")
    assert (converted["format"], converted["events"], converted["buffers"]) == ("trace", 3, 2)
    back, given = read_trace("s.trace"), read_snapshot("s.pickle")
    for name in ("kind", "buffer", "size", "time_ns", "address"):
        np.testing.assert_array_equal(getattr(back, name), getattr(given, name))
    assert back.metadata == given.metadata


def test_trace_becomes_a_csv_of_all_its_buffers(convert_folder: Path) -> None:
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
def files(convert_folder: Path) -> Path:
    """The convert_folder with a contradictory log of RMM, CuPy's lines and a packed profiler's trace."""
    (convert_folder / "rmm.csv").write_text(RMM)
    (convert_folder / "cupy.log").write_text(CUPY)
    (convert_folder / "profile.json.gz").write_bytes(
        gzip.compress(profiled((1, 64, 500), (2, 64, -500)).encode())
    )
    return convert_folder


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


def test_converted_csv_has_the_plan_of_its_trace(
    convert_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_suffix_decides_between_a_csv_and_a_trace(convert_folder: Path) -> None:
    for target in ("x.trace", "x.parquet", "x", "x.csv", "x.v1.2"):
        assert call(["convert", "s.pickle", target]) == 0

"""``mempool compare`` and ``convert``: all formats, one table for each trace, one error for each bad file."""

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
from answers import Cli
from commands import COMMAND
from recordings import random_trace

from mempool.simulate import ALLOCATORS
from traces import EventType, Trace, buffers_of
from traces.formats.minimalloc import read_csv
from traces.formats.parquet import read_trace, write_trace
from traces.formats.snapshot import read_snapshot
from traces.workload import generate

TWO = "-a first_fit -a best_fit:growth_bytes=4MiB"
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


def profiled(*events: tuple[float, int, int]) -> bytes:
    names = ("Bytes", "Addr", "Device Type", "Device Id")
    told: list[dict[str, Any]] = [
        {"ph": "i", "name": "[memory]", "ts": ts, "args": dict(zip(names, (size, at, 0, -1), strict=True))}
        for ts, at, size in events
    ]
    for category, name in (
        ("python_function", "/home/me/secret/train.py(7): step"),
        ("cpu_op", "aten::empty"),
    ):
        told.append({"ph": "X", "cat": category, "name": name, "ts": 0, "dur": 99})
    return json.dumps({"traceEvents": [event | {"pid": 1, "tid": 1} for event in told]}).encode()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with traces of two ranks and a file of each format; RMM's contradicts itself."""
    monkeypatch.chdir(tmp_path)
    for rank in range(2):
        Path(f"run{rank}").mkdir()
        write_trace(random_trace(rank, 300 + 200 * rank), f"run{rank}/rank.trace")
    write_trace(generate(60, 1), "t.trace")
    write_trace(Trace.of([EventType.MARK], [-1]), "marks.trace")
    write_trace(
        Trace.of([EventType.ALLOC], [0], [4096], operation=[0], names=["[/bold]\ud800"]), "odd [x] y.trace"
    )
    events: list[dict[str, Any]] = [
        {"action": action, "addr": addr, "size": 100, "stream": 0, "time_us": at, "frames": []}
        for at, (action, addr) in enumerate([("alloc", 512), ("alloc", 1024), ("free_completed", 512)])
    ]
    Path("s.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}, 4))
    Path("rmm.csv").write_text(RMM)
    Path("cupy.log").write_text(CUPY)
    Path("profile.json.gz").write_bytes(gzip.compress(profiled((1, 64, 500), (2, 64, -500))))
    return tmp_path


pytestmark = pytest.mark.usefixtures("folder")


def test_every_allocator_has_a_row_with_complete_json_fields(cli: Cli) -> None:
    rows = cli.answer("compare run0/rank.trace")
    assert [row["allocator"] for row in rows] == list(ALLOCATORS)
    for row in rows:
        assert (row["file"], row["fits"]) == ("run0/rank.trace", None)
        assert row["peak_reserved_bytes"] >= row["peak_live_bytes"] > 0
        assert 0 <= row["fragmentation"] < 1
        assert row["driver_calls"] > 0


def test_patterns_stand_for_their_files_and_the_worst_is_named(cli: Cli) -> None:
    rows = cli.answer("compare 'run*/rank.trace' run0/rank.trace --limit 1GiB", TWO)
    assert [(row["file"], row["allocator"], row["fits"]) for row in rows] == [
        (f"run{rank}/rank.trace", name, True) for rank in range(2) for name in ("first_fit", "best_fit")
    ]
    worst = max(rows[::2], key=lambda row: row["peak_reserved_bytes"])["file"]
    summary = cli.printed("compare 'run*/rank.trace'", TWO, "-a cupy").split("all files")[1]
    line = next(line for line in summary.splitlines() if "first_fit" in line)
    assert f"{worst}, device 0" in line
    assert "cupy" in summary


def test_bad_file_is_reported_and_the_other_files_are_compared(cli: Cli) -> None:
    Path("bad.trace").write_bytes(b"nothing")
    out, err = cli.run("compare bad.trace run0/rank.trace gone.trace -a first_fit --json", code=3)
    told = {row["file"]: bool(row["error"]) for row in json.loads(out)}
    assert told == {"bad.trace": True, "run0/rank.trace": False, "gone.trace": True}
    bad, gone = sorted(err.splitlines())
    assert bad.startswith("mempool: bad.trace: neither a trace")
    assert gone == "mempool: gone.trace: No such file or directory"


def test_error_of_an_allocator_does_not_disturb_the_others(cli: Cli) -> None:
    out, err = cli.run("compare run0/rank.trace -a recorded -a cupy --json", code=2)
    unknown, cupy = json.loads(out)
    assert unknown.keys() == cupy.keys()
    assert (unknown["peak_reserved_bytes"], cupy["error"]) == (None, None)
    assert err == f"mempool: run0/rank.trace: recorded: {unknown['error']}\n"


def test_worker_processes_end_with_their_parent_and_with_ctrl_c() -> None:
    """Worker processes end however the parent ends."""
    write_trace(random_trace(5, 60_000), "large.trace")
    for k in range(12):
        Path(f"l{k}.trace").write_bytes(Path("large.trace").read_bytes())
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


@pytest.mark.parametrize("target", ["x.trace", "x.parquet", "x", "x.v1.2"])
def test_snapshot_becomes_a_trace_with_its_addresses(cli: Cli, target: str) -> None:
    converted = cli.answer("convert s.pickle", target)
    assert (converted["format"], converted["events"], converted["buffers"]) == ("trace", 3, 2)
    back, given = read_trace(target), read_snapshot("s.pickle")
    for name in ("kind", "buffer", "size", "time_ns", "address"):
        np.testing.assert_array_equal(getattr(back, name), getattr(given, name))
    assert back.metadata == given.metadata


def test_every_format_is_read_by_every_verb(cli: Cli) -> None:
    """The verbs inspect, convert and plan each file, and check the plan."""
    for source, peak in (("cupy.log", 24), ("profile.json.gz", 500), ("s.pickle", 200)):
        assert cli.answer("info", source)["peak_load_bytes"] == peak
        assert cli.answer("convert", source, "x.trace")["events"] == len(read_trace("x.trace"))
        cli.run("plan", source, "-o x.plan")
        cli.run("check x.plan x.trace")
        cli.run("check x.plan", source)
        cli.run("compare", source, "-a first_fit")


def test_impossible_events_stop_a_verb_or_are_left_out_and_counted(cli: Cli) -> None:
    """An error line names the first event; with --lenient, a line and the JSON count the events by reason."""
    error = cli.error("info rmm.csv", code=3)
    assert error == "mempool: rmm.csv, row 3: allocated again without a free: address 0x200\n"
    told = "mempool: rmm.csv: 2 events left out: 1 allocated again without a free, 1 not 6 fields"
    for command in (
        "info rmm.csv",
        "convert rmm.csv x.trace",
        "convert rmm.csv x.csv",
        "plan rmm.csv -o x.plan",
        "check x.plan rmm.csv",
        "compare rmm.csv -a first_fit",
    ):
        out, err = cli.run(command, "--lenient --json")
        answer = json.loads(out)[0] if command.startswith("compare") else json.loads(out)
        assert answer["skipped"] == {"allocated again without a free": 1, "not 6 fields": 1}
        first, *caveats = err.splitlines()
        assert first == told
        assert len(caveats) == command.startswith("plan")  # of a buffer that is older than the log
    assert read_trace("x.trace").load().tolist() == [300, 400, 100]


def test_source_lines_are_left_out_unless_requested(cli: Cli) -> None:
    """Both in reports and in converted traces; folders are left out of reports always."""
    names = ["/home/me/secret/deep.py:3", "C:\\secret\\deep.py:3", "aten::empty"]
    names.append("/home/me/secret/deep.py:3 f\n/home/me/secret/main.py:9 g")
    told = Trace.of([0, 0], [0, 1], [8, 16], frame=[0, 1], operation=[2, 2], stack=[3, 3], names=names)
    write_trace(told, "folders.trace")
    for source, line in (("profile.json.gz", "train.py:7"), ("folders.trace", "deep.py:3")):
        for how, shown in (("", False), ("--frames", True)):
            out = cli.printed("info", source, how) + cli.printed("info", source, "--json", how)
            assert "secret" not in out
            assert "aten::empty" in out
            assert (line in out) == shown
            cli.run("convert", source, "x.trace", how)
            names, content = read_trace("x.trace").names, Path("x.trace").read_bytes()
            assert any(line in name for name in names) == (line.encode() in content) == shown
            assert shown or b"secret" not in content
            assert "aten::empty" in names


def test_converted_csv_has_the_buffers_and_the_plan_of_its_trace(cli: Cli) -> None:
    cli.run("convert t.trace b.csv")
    buffers, back = buffers_of(read_trace("t.trace")), read_csv("b.csv")
    for name in ("start", "end", "size", "alignment"):
        np.testing.assert_array_equal(getattr(back, name), getattr(buffers, name))
    cli.run("convert b.csv c.trace")
    files = ("b.csv", "c.trace", "t.trace")
    assert len({cli.answer("plan --whole", file)["arena_bytes"] for file in files}) == 1
    [row] = cli.answer("compare b.csv -a best_fit")
    assert row["peak_load_bytes"] == read_trace("t.trace").load().max()

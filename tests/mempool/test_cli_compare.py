"""Tests of ``mempool compare``: one table a trace, a summary of many, one error a bad file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from answers import answer, printed
from commands import COMMAND
from simulations import random_trace

from mempool.cli.app import call
from mempool.simulate import ALLOCATORS
from traces import EventType, Trace
from traces.formats.parquet import write_trace

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

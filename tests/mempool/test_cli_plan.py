"""``mempool plan``, ``check`` and ``info``: answers, files written whole."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from answers import Cli
from commands import COMMAND
from instances import aligned

from solvers import check, peak_load, read_plan
from traces import Buffers, Trace
from traces.formats.minimalloc import write_csv
from traces.formats.parquet import write_trace
from traces.workload import generate

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with a trace of three iterations and a CSV."""
    monkeypatch.chdir(tmp_path)
    write_trace(generate(60, 1), "t.trace")
    rng = np.random.default_rng(3)
    start = rng.integers(0, 50, 20)
    buffers = Buffers.of(
        start, start + rng.integers(1, 20, 20), rng.integers(1, 99, 20), ids=[f"b{i}" for i in range(20)]
    )
    write_csv(buffers, "b.csv")
    return tmp_path


def test_trace_is_planned_checked_and_shown(folder: Path, cli: Cli) -> None:
    """The plan of the steady iteration passes the independent check and agrees with the file."""
    planned = cli.answer("plan t.trace -o p.plan")
    assert {"status", "arena_bytes", "lower_bound_bytes", "solver", "seconds"} <= planned.keys()
    assert planned["iterations"] > 1
    plan, buffers, *_ = read_plan("p.plan")
    check(plan, buffers)
    assert planned["peak_load_bytes"] == peak_load(buffers) <= planned["arena_bytes"] == plan.arena_bytes
    assert planned["period"] == buffers.period
    assert cli.answer("check p.plan t.trace")["ok"] is True
    shown = cli.answer("info p.plan")
    assert shown["arena_bytes"] == planned["arena_bytes"]
    assert 0 <= shown["fragmentation"] < 1


def test_whole_trace_is_planned_on_a_line(folder: Path, cli: Cli) -> None:
    """--whole plans every buffer of the file, into Parquet or CSV, and both pass the check."""
    for name in ("w.plan", "w.csv"):
        planned = cli.answer("plan t.trace --whole -o", name)
        assert (planned["period"], planned["iterations"]) == (None, 1)
        assert cli.answer("check", name, "t.trace")["ok"]


def test_wrong_plan_or_plan_of_another_trace_is_refused(folder: Path, cli: Cli) -> None:
    """The exit code is 1, and a line on stderr and the JSON object have the reason."""
    Path("s.csv").write_text("id,lower,upper,size,offset\na,0,5,10,0\nb,4,9,10,9\n")
    write_trace(generate(60, 2), "other.trace")
    cli.run("plan t.trace -o p.plan")
    period = read_plan("p.plan")[1].period
    for files, reason in (
        ("s.csv s.csv", "a"),
        ("p.plan other.trace", "another trace"),
        ("p.plan b.csv", f"of period {period}, not a linear trace"),
    ):
        assert reason in cli.error("check", files, code=1)
        assert cli.answer("check", files, code=1)["ok"] is False


def test_too_small_a_capacity_is_a_negative_answer(folder: Path, cli: Cli) -> None:
    """The exit code is 1, no file is written, and the JSON object has the reason."""
    planned = cli.answer("plan b.csv -o s.csv --capacity 1", code=1)
    assert (planned["status"], planned["arena_bytes"]) == ("infeasible", None)
    assert planned["reason"]
    assert not Path("s.csv").exists()


def processor_seconds(pid: int) -> float:
    """Return the processor seconds of this process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_ctrl_c_keeps_the_best_plan(folder: Path, cli: Cli) -> None:
    """On SIGINT during a search, the exit code is 130, and the best plan is written and passes the check."""
    write_csv(aligned(29, 350), "hard.csv")
    limited = ["--time-limit", "250", "--json", "--solver", "greedy"]
    process = subprocess.Popen(
        [COMMAND, "plan", "hard.csv", "-o", "best.plan", *limited],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while processor_seconds(process.pid) < 1.5:  # the search has started, even on a busy machine
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert json.loads(out)["stopped_by"] == "interrupt"
    assert err.count("\n") == 1
    cli.run("check best.plan hard.csv")


def test_info_counts_the_contents_of_a_trace(folder: Path, cli: Cli) -> None:
    """Events, buffers and the load agree with the trace."""
    trace = Trace.of(
        [0, 0, 1, 0, 4, 1],
        [0, 1, 0, 2, -1, 2],
        [100, 50, 0, 30, 0, 0],
        operation=[0, -1, -1, -1, -1, -1],
        names=("matmul",),
    )
    write_trace(trace, "small.trace")
    shown = cli.answer("info small.trace")
    counts = {"events": 6, "allocs": 3, "frees": 2, "marks": 1, "buffers": 3, "requested_bytes": 180}
    assert {key: shown[key] for key in counts} == counts
    assert shown["peak_load_bytes"] == 150
    largest = [(entry["size_bytes"], entry.get("operation")) for entry in shown["largest_at_peak"]]
    assert largest == [(100, "matmul"), (50, None)]


def test_empty_trace_is_no_error(folder: Path, cli: Cli) -> None:
    """A trace without events is planned with an arena of 0 bytes, checked and shown."""
    write_trace(Trace.of([], [], []), "empty.trace")
    cli.run("plan empty.trace -o empty.plan")
    cli.run("check empty.plan empty.trace")
    cli.run("info empty.trace")
    cli.run("info empty.plan")


def test_every_json_key_is_documented(folder: Path, cli: Cli) -> None:
    """Keys are an interface: docs/cli.md lists each of them, and they are in snake case."""
    documented = set(re.findall(r"`([a-z0-9_]+)`", DOCS.read_text()))
    cli.run("plan t.trace -o p.plan")
    for command in (
        "plan t.trace",
        "plan t.trace --capacity 1GiB",
        "check p.plan t.trace",
        "info t.trace",
        "info p.plan",
        "info b.csv",
    ):
        shown = cli.answer(command)
        entries = shown.get("largest_at_peak", ())
        assert {key for entry in (shown, *entries) for key in entry} <= documented, command

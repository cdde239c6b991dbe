"""Tests of ``mempool swap``: limits in, a table or one object out, and one line for an error."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from answers import answer, printed
from swap_traces import MIB, training

from mempool.cli.app import call
from traces.formats.parquet import write_trace

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> str:
    write_trace(training(), tmp_path / "run.trace")
    return str(tmp_path / "run.trace")


def test_each_limit_has_its_row(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = answer(capsys, "swap", path, "--limit", "33MiB", "--limit", "free", "--limit", "50%")
    assert said["peak_load_bytes"] == 49 * MIB
    assert said["repeats"]
    held, free, slower = said["limits"]
    assert held["peak_bytes"] <= held["limit_bytes"] == 33 * MIB
    assert free["stall_seconds"] == 0
    assert slower["stall_seconds"] <= 0.5 * said["iteration_seconds"]
    for row in (held, free, slower):
        assert row["iteration_seconds"] == pytest.approx(said["iteration_seconds"] + row["stall_seconds"])
        assert row["swapped_bytes"] == row["moves"] * 8 * MIB


def test_curve_without_a_limit_stalls_longer_at_lower_limits(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = answer(capsys, "swap", path, "--link", "1e-5,1e-10")["limits"]
    assert len(rows) > 2
    stalls = [row["stall_seconds"] for row in rows]
    assert stalls == sorted(stalls)
    assert [row["limit_bytes"] for row in rows] == sorted((r["limit_bytes"] for r in rows), reverse=True)
    assert all(row["stall_bound_seconds"] <= row["stall_seconds"] for row in rows)


def test_swap_table_and_moves_file_agree_with_the_limit(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = printed(capsys, "swap", path, "--limit", "33MiB", "-o", str(tmp_path / "moves.json"))
    written = json.loads((tmp_path / "moves.json").read_text())
    assert "33 MiB" in shown
    assert "link bound" in shown
    assert written["limits"][0]["limit_bytes"] == 33 * MIB
    moves = written["moves"]
    assert len(moves) == written["limits"][0]["moves"] > 0
    for move in moves:
        order = ("last_operation", "out_operation", "release_operation", "fetch_operation", "use_operation")
        assert [move[key] for key in order] == sorted(move[key] for key in order)


def test_trace_without_marks_is_cut_where_iterations_repeat(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(training(marks=False, layers=20), tmp_path / "plain.trace")
    said = answer(capsys, "swap", str(tmp_path / "plain.trace"), "--limit", "free")
    assert said["repeats"]
    assert said["operations"] == 40
    whole = answer(capsys, "swap", path, "--limit", "free", "--whole")
    assert not whole["repeats"]
    assert whole["operations"] == 48


def test_below_the_working_set_the_answer_is_no(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["swap", path, "--limit", "1MiB", "--limit", "40MiB"]) == 1
    out, error = capsys.readouterr()
    assert "cannot be held" in out
    assert "no gain possible below" in error
    least = int(error.split("; ")[1].split(" bytes")[0])
    assert f"{least} bytes (9 MiB) can be held" in error
    capsys.readouterr()
    assert call(["swap", path, "--limit", str(least)]) == 0
    capsys.readouterr()
    assert call(["swap", path, "--limit", str(least - 1)]) == 1
    error = capsys.readouterr().err
    assert "touches" in error
    assert len(error.splitlines()) == 1


def test_measured_link_is_reported_and_used(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["swap", path, "--limit", "40MiB", "--link", "Measured"]) == 0
    out, error = capsys.readouterr()
    assert error.startswith("mempool: the link is measured ")
    assert len(error.splitlines()) == 1
    (line,) = [line for line in out.splitlines() if line.startswith("link  ")]
    assert "GB/s, back " in line


def test_link_measurement_without_a_gpu_imports_no_framework(path: str) -> None:
    code = (
        "import sys; from mempool import _core; from mempool.cli.app import call; _core.cuda_devices = list\n"
        f"assert call(['swap', {path!r}, '--limit', 'free', '--link', 'measured']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_host_limit_is_kept_and_reported(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A lower limit that needs more host memory can no longer be held.

    The arenas are reported for the last limit.
    """
    much = answer(capsys, "swap", path, "--limit", "25MiB")
    (row,) = much["limits"]
    assert row["host_bytes"] >= 24 * MIB
    assert much["arena_bytes"] >= row["peak_bytes"]
    assert much["host_arena_bytes"] >= row["host_bytes"]
    (row,) = answer(capsys, "swap", path, "--limit", "33MiB", "--host", "16MiB")["limits"]
    assert row["host_bytes"] <= 16 * MIB
    assert call(["swap", path, "--limit", "25MiB", "--host", "16MiB"]) == 1
    out, error = capsys.readouterr()
    assert "cannot be held" in out
    assert "can be held" in error
    assert "with so few bytes on the host, not below 33 MiB" in printed(
        capsys, "swap", path, "--host", "16MiB"
    )
    assert "so few bytes" not in printed(capsys, "swap", path)


def test_limit_above_the_peak_moves_nothing(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty schedule is written all the same."""
    assert "nothing has to move" in printed(capsys, "swap", path, "--limit", "1GiB")
    assert "nothing has to move" not in printed(capsys, "swap", path, "--limit", "33MiB")
    said = answer(capsys, "swap", path, "--limit", "1GiB", "-o", str(tmp_path / "none.json"))
    assert said["limits"][0]["moves"] == said["limits"][0]["stall_seconds"] == 0
    assert json.loads((tmp_path / "none.json").read_text())["moves"] == []
    assert said["arena_bytes"] == said["peak_load_bytes"]
    assert said["host_arena_bytes"] == 0

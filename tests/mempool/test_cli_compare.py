"""``mempool compare``: one table a trace, a summary of many, one error a bad file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from simulations import random_trace

from mempool.cli.app import call
from mempool.what_if import ALLOCATORS
from traces.parquet import write_trace

if TYPE_CHECKING:
    from pathlib import Path

TWO = ["-a", "first_fit", "-a", "best_fit:growth_bytes=4MiB"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with the traces of two ranks."""
    monkeypatch.chdir(tmp_path)
    for rank in range(2):
        (tmp_path / f"run{rank}").mkdir()
        write_trace(random_trace(rank, 300 + 200 * rank), f"run{rank}/rank.trace")
    return tmp_path


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_every_allocator_has_a_row_with_what_scripts_need(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["compare", "run0/rank.trace", "--json"]) == 0
    rows = said(capsys)
    assert [row["allocator"] for row in rows] == list(ALLOCATORS)
    for row in rows:
        assert row["file"] == "run0/rank.trace"
        assert row["fits"] is None
        assert row["peak_reserved_bytes"] >= row["peak_live_bytes"] > 0
        assert 0 <= row["fragmentation"] < 1
        assert row["driver_calls"] > 0


def test_a_limit_tells_who_runs_out_and_on_what(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["compare", "run0/rank.trace", *TWO, "--limit", "1GiB", "--json"]) == 0
    rows = said(capsys)
    assert {row["fits"] for row in rows} == {True}
    limit = rows[0]["peak_load_bytes"] // 2
    assert call(["compare", "run0/rank.trace", *TWO, "--limit", str(limit)]) == 0
    text = capsys.readouterr().out
    assert "first_fit runs out of" in text
    assert "best_fit:growth_bytes=4194304 runs out of" in text


def test_patterns_stand_for_their_files_and_the_worst_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["compare", "run*/rank.trace", "run0/rank.trace", *TWO, "--json"]) == 0
    rows = said(capsys)
    files = ["run0/rank.trace", "run1/rank.trace"]
    assert [(row["file"], row["allocator"]) for row in rows] == [
        (file, name) for file in files for name in ("first_fit", "best_fit")
    ]
    worst = max(rows[::2], key=lambda row: row["peak_reserved_bytes"])["file"]
    assert call(["compare", "run*/rank.trace", *TWO]) == 0
    summary = capsys.readouterr().out.split("all files")[1]
    line = next(line for line in summary.splitlines() if "first_fit" in line)
    assert f"{worst}, device 0" in line


def test_a_bad_file_is_told_and_the_others_are_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.trace").write_bytes(b"nothing")
    assert call(["compare", "bad.trace", "run0/rank.trace", "gone.trace", "-a", "first_fit", "--json"]) == 3
    output = capsys.readouterr()
    assert [row["file"] for row in json.loads(output.out)] == ["run0/rank.trace"]
    errors = sorted(output.err.splitlines())
    assert len(errors) == 2
    assert errors[0].startswith("mempool: bad.trace: neither a trace")
    assert errors[1] == "mempool: gone.trace: No such file or directory"


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["run0/rank.trace", "-a", "nobody"], 2, "no allocator 'nobody'"),
        (["run0/rank.trace", "--limit", "much"], 2, "'much' is not a size"),
        (["none*.trace"], 3, "none*.trace: no file matches"),
        (["run0/rank.trace", "-a", "recorded"], 3, "does not tell what its allocator reserved"),
        ([], 2, "Missing argument"),
    ],
)
def test_what_cannot_be_compared_is_told_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, reason: str
) -> None:
    assert call(["compare", *arguments]) == code
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1

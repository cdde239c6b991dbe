"""Tests of ``mempool show --swap``.

Output of ``mempool swap`` is drawn, and any other file is a one-line error.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from swap_traces import MIB, training

from mempool.cli.app import call
from traces import Trace
from traces.formats.parquet import write_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

drawn = pytest.mark.skipif(importlib.util.find_spec("bokeh") is None, reason="bokeh is not installed")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a trace and a file of moves."""
    path = tmp_path_factory.mktemp("swaps")
    write_trace(training(), path / "run.trace")
    plan = ["swap", str(path / "run.trace"), "--limit", "33MiB", "-o", str(path / "moves.json")]
    assert call(plan) == 0
    return path


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with a trace and a file of moves."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


@drawn
@pytest.mark.parametrize("more", [[], ["--whole"], ["--bandwidth", "10GB"]])
def test_page_opens_with_the_swaps(folder: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """However the step was cut and timed, the page finds the step again."""
    assert call(["swap", "run.trace", "--limit", "33MiB", *more, "-o", "moves.json", "--json"]) == 0
    capsys.readouterr()
    assert call(["show", "run.trace", "--swap", "moves.json", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["timelines"][:2] == ["device, with swaps", "host, copies"]
    assert [one["of"] for one in said["views"]][:2] == said["timelines"][:2]
    assert (folder / "run.html").stat().st_size > 100_000


@drawn
def test_planned_device_of_several_is_drawn(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = training()
    two = Trace.of(
        np.tile(one.kind, 2),
        np.concatenate([one.buffer, np.where(one.buffer < 0, -1, one.buffer + 1000)]),
        np.tile(one.size, 2),
        device=np.repeat([0, 1], len(one)),
        time_ns=np.tile(one.time_ns, 2),
        operation=np.tile(one.operation, 2),
        names=one.names,
        metadata=one.metadata,
    )
    write_trace(two, "two.trace")
    plan = ["swap", "two.trace", "--device", "1", "--limit", "33MiB", "-o", "moves.json", "--json"]
    assert call(plan) == 0
    capsys.readouterr()
    assert call(["show", "two.trace", "--swap", "moves.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["timelines"][0] == "device, with swaps"


def _set(*path: str | int) -> Callable[[Any, Any], None]:
    def change(said: Any, value: Any) -> None:
        for key in path[:-1]:
            said = said[key]
        said[path[-1]] = value

    return change


FAULTS: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "another step": (("operations",), 11),
    "another peak": (("peak_load_bytes",), 5),
    "another buffer": (("moves", 0, "buffer"), 1),
    "a buffer beyond": (("moves", 0, "row"), 10**9),
    "a huge buffer": (("moves", 0, "row"), 10**30),
    "a negative operation": (("moves", 0, "out_operation"), -1),
    "a use too early": (("moves", 0, "use_operation"), 3),
    "an operation beyond": (("moves", 0, "fetch_operation"), 2**61),
    "a word": (("moves", 0, "last_operation"), "1"),
    "a truth for a number": (("limits", -1, "limit_bytes"), True),
    "a number for a truth": (("moves", 0, "copied"), 1),
    "nothing copied": (("moves", 0, "copied"), False),
    "no moves": (("moves",), []),
    "moves that are none": (("moves",), {"a": 1}),
    "a move that is none": (("moves", 0), 7),
    "rows beyond": (("step", "window"), [0, 10**6]),
    "rows backwards": (("step", "window"), [50, 10]),
    "one row": (("step", "window"), [1]),
    "no bandwidth": (("step", "bandwidth"), 0),
    "no time": (("step", "bandwidth"), 1e-290),
    "no number": (("step", "bandwidth"), float("nan")),
    "a device that is none": (("step", "device"), "x"),
    "a link backwards": (("link", "in_fixed"), -1),
    "a link for ever": (("link", "in_fixed"), 1e300),
    "a link too many": (("link", "warp"), 1.0),
    "a link that is none": (("link",), []),
    "no limit": (("limits",), []),
}


@pytest.mark.parametrize("what", FAULTS)
@drawn
def test_moves_of_another_trace_are_a_single_line(
    folder: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = json.loads((folder / "moves.json").read_text())
    _set(*FAULTS[what][0])(said, FAULTS[what][1])
    (folder / "moves.json").write_text(json.dumps(said))
    assert call(["show", "run.trace", "--swap", "moves.json"]) == 3
    error = capsys.readouterr().err
    assert error.startswith("mempool: moves.json: ")
    assert len(error.splitlines()) == 1
    assert not (folder / "run.html").exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", "[" * 100_000, '{"step": 1e999}', "\x00\xff", "9" * 9999]
)
@drawn
def test_invalid_moves_file_is_a_single_line(
    folder: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "moves.json").write_text(text)
    assert call(["show", "run.trace", "--swap", "moves.json"]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


@drawn
def test_missing_and_conflicting_files_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["show", "run.trace", "--swap", "none.json"]) == 3
    assert call(["show", "run.trace", "--swap", "moves.json", "-o", "moves.json"]) == 2
    (folder / "b.csv").write_text("id,lower,upper,size\n1,0,2,4\n")
    assert call(["show", "b.csv", "--swap", "moves.json"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_shown_peak_is_the_planned_peak(folder: Path) -> None:
    """The moves read back give the planned schedule."""
    from solvers.swap import replay
    from solvers.swap.schedule_file import read_schedule

    moves = read_schedule(folder / "moves.json")
    step = moves.selection.step(training())
    assert replay(step, moves.link, moves.schedule(step)).peak_bytes <= moves.limit_bytes == 33 * MIB

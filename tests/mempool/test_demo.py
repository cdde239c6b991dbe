"""The demonstration: the pool changes only memory and time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mempool import _core
from mempool.cli.app import call
from mempool.demo import race as module
from mempool.demo.race import Race, WorkerError, race
from mempool.demo.worker import best_framework

DOCS = Path(__file__).parents[2] / "docs" / "cli.md"


@pytest.fixture(scope="module", params=[True, False], ids=["marks", "no-marks"])
def done(request: pytest.FixtureRequest) -> Race:
    return race("numpy", marks=request.param, steps=6, turns=6, show=lambda _: None)


def test_results_are_identical_to_the_bit_and_the_steady_state_has_no_misses(done: Race) -> None:
    """All losses and the parameters agree between two runs of the default allocator, and with the pool."""
    assert done.repeatable
    assert done.identical
    assert len(done.pool.losses) == 36
    answer = done.answer()
    assert answer["state"] == "replaying"
    assert answer["hits"] > 0
    assert answer["misses"] == 0
    assert answer["coverage"] >= 0.99


def test_reserved_memory_is_the_peak_load_and_persistent_buffers(done: Race) -> None:
    """Reserved memory is at most 2 % above peak load and persistent buffers, and Linux sees little on top."""
    answer = done.answer()
    needed = answer["peak_load_bytes"] + answer["persistent_bytes"]
    assert answer["lower_bound_bytes"] <= answer["arena_bytes"] <= answer["reserved_bytes"]
    assert needed <= answer["reserved_bytes"] <= 1.02 * needed
    assert answer["resident_bytes"]["pool"] <= 1.15 * answer["reserved_peak_bytes"]


def test_every_json_key_is_documented(done: Race) -> None:
    """Keys are an interface: docs/cli.md lists each of them."""
    documented = set(re.findall(r"`([a-z0-9_]+)`", DOCS.read_text()))
    assert json.loads(json.dumps(done.answer())).keys() <= documented


@pytest.mark.skipif(bool(_core.cuda_devices()), reason="this machine has a CUDA device")
def test_demo_without_a_gpu_trains_in_numpy(capsys: pytest.CaptureFixture[str]) -> None:
    assert best_framework() == "numpy"
    assert call(["demo", "--framework", "cupy"]) == 2
    assert "CuPy needs a GPU" in capsys.readouterr().err


def test_failing_process_is_a_single_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 4, and stderr has the last line of the process."""
    monkeypatch.setattr(module, "WORKER", ("-c", "raise SystemExit('no such luck')"))
    with pytest.raises(WorkerError, match="no such luck"):
        race("numpy", marks=True, steps=1, turns=5, show=lambda _: None)
    assert call(["demo"]) == 4
    assert capsys.readouterr().err.count("\n") == 1


def test_current_folder_does_not_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's command runs in the clone, whose folder mempool/ has no native module."""
    for name in ("mempool", "json", "numpy"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    done = race("numpy", marks=True, steps=1, turns=5, show=lambda _: None)
    assert len(done.pool.losses) == 5

"""Status line and page of the memory of ``mempool run``."""

from __future__ import annotations

from pathlib import Path

import programs
import pytest
from commands import MEMPOOL, outcome, start, write
from pools import run

from mempool import Pool
from mempool.cli.run.monitor import status
from mempool.reporting import memory_history
from mempool.reporting.memory_history import MemoryHistory


def test_status_has_the_pools_with_memory(pool: Pool) -> None:
    assert status({"numpy": pool}) == ""
    memory = programs.Watched(pool)
    run(pool, lambda _: programs.layers(memory, scale=1 << 18), 10, marks=True)
    said = status({"numpy": pool})
    assert said.startswith("numpy: step 10, replaying, 100.0% at planned addresses, live ")


def test_history_of_a_long_program_keeps_peaks_and_moments(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_history, "MOST_SAMPLES", 8)
    history, counts = MemoryHistory(pool), []
    for number in range(100):
        run(pool, lambda _: pool.free(pool.allocate(200_000)), 1, marks=True, first=number)
        if number == 50:
            pool.free(pool.allocate(500_000))
        history.sample()
        counts.append(len(history.samples))
    assert 4 <= min(counts[8:]) <= max(counts) <= 8
    steps = [sample.step for sample in history.samples]
    assert steps == sorted(set(steps))
    assert steps[-1] == 100
    live = [sample.live for sample in history.samples]
    assert max(live) >= 500_000 > sorted(live)[-2]
    assert pool.report().values["live_peak_bytes"] == max(live)
    assert 1 < history.plans[0].step < 10


@pytest.mark.parametrize("steps", [True, False])
def test_plot_is_a_page_of_the_pools_that_had_work(tmp_path: Path, steps: bool) -> None:
    pytest.importorskip("bokeh", reason="Bokeh is not installed")
    program = f"""
        import numpy as np
        import mempool.numpy
        for _ in range(30):
            x = np.ones(200_000); del x
            if {steps}: mempool.numpy.installed().step()
    """
    write(tmp_path / "script.py", program)
    done = outcome(start(tmp_path, *MEMPOOL, "--plot", "memory.html", "script.py"))
    assert done.status == 0, done.stderr
    assert done.stderr.count("\n") == 1
    text = (tmp_path / "memory.html").read_text()
    assert "numpy: " in text
    assert ('"axis_label":"step"' in text) == steps
    refused = outcome(start(tmp_path, *MEMPOOL, "--plot", "script.py", "script.py"))
    assert (refused.status, refused.stdout) == (2, "")

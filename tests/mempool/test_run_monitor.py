"""Status line and page of the memory of ``mempool run``."""

from __future__ import annotations

from pathlib import Path

import programs
import pytest
from commands import MEMPOOL, outcome, start, write
from pools import run

from mempool import Pool
from mempool.cli.run.monitor import status


def test_status_has_the_pools_with_memory(pool: Pool) -> None:
    assert status({"numpy": pool}) == ""
    memory = programs.Watched(pool)
    run(pool, lambda _: programs.layers(memory, scale=1 << 18), 10, marks=True)
    said = status({"numpy": pool})
    assert said.startswith("numpy: step 10, replaying, 100.0% at planned addresses, live ")


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

"""Snapshots of the core: limits on their effect on other allocating threads."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import gc
from mempool import Pool, _core

class Owner:
    def __init__(self):
        self.address, self.me = pool.allocate(3000), self

    def __del__(self):
        pool.free(self.address)

with Pool(_core.SimulatedDevice(page=4096), background=False) as pool:
    _core.set_history(pool.client, 100)
    questions = [
        lambda: _core.snapshot(pool.core, pool.client),
        lambda: _core.usage(pool.core),
        pool.core.stats,
        pool.client.stats,
    ]
    gc.collect()
    for question in questions:
        gc.disable()
        for _ in range(3):
            Owner()
        gc.set_threshold(1, 1, 1)
        gc.enable()
        question()
    gc.collect()
    assert pool.core.stats()["live_blocks"] == 0
"""


def test_answers_make_no_objects_under_the_lock() -> None:
    """Any new Python object may start the garbage collector, which frees buffers and takes the lock."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], timeout=60, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")

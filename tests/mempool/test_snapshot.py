"""Snapshots of the core: what they may not do to those who allocate meanwhile."""

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


def test_what_answers_makes_no_objects_under_the_lock() -> None:
    """The garbage collector may come with any object of Python, and frees buffers, which takes the lock."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], timeout=60, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")

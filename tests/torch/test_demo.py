"""The demonstration in PyTorch: the pool changes nothing but memory and time."""

from __future__ import annotations

import statistics

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from mempool.demo.race import race


@pytest.mark.parametrize(
    "marks", [pytest.param(True, marks=pytest.mark.full), False], ids=["marks", "no-marks"]
)
def test_training_is_identical_with_all_hits_in_less_memory(marks: bool) -> None:
    done = race("torch", marks=marks, steps=5, turns=6, show=lambda _: None)
    answer = done.answer()
    assert done.identical
    assert (answer["state"], answer["misses"]) == ("replaying", 0)
    assert answer["coverage"] >= 0.99
    assert answer["planned_arena_bytes"] <= 1.02 * answer["peak_load_bytes"]
    # Of a step; glibc mostly has thousands, and now and then happens to keep what the program frees.
    assert statistics.median(done.pool.page_faults) <= 16

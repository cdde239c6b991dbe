"""Training that departs from its habits: the same results to the bit, and the plan is found again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import told_by

pytest.importorskip("torch", reason="PyTorch is not installed")

HERE = Path(__file__).resolve().parent
#: Iterations at the end in which nothing misses any more; the last departure is a few before.
LAST = 8
KEPT = ("logged_clones", "second_model")
SCENARIOS = [
    "extra_tensor",
    "logged_clones",
    "evaluation",
    "last_batch",
    "lengths",
    "exception",
    "out_of_memory",
    "second_model",
    "saved",
    "frozen",
    "scheduled",
]


def run(way: str, scenario: str, observer: str) -> dict[str, Any]:
    return told_by(HERE / "diverging.py", way, scenario, observer)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_results_are_the_same_and_the_plan_is_followed_again(observer: str, scenario: str) -> None:
    plain, pooled = run("plain", scenario, observer), run("pool", scenario, observer)
    assert pooled["losses"] == plain["losses"]
    assert pooled["parameters"] == plain["parameters"]
    assert pooled["kept"] == plain["kept"]
    assert pooled["overlaps"] == 0
    misses = [count[1] for count in pooled["counts"]]
    assert len(set(misses[-LAST:])) == 1, misses
    assert pooled["report"]["state"] == "replaying"
    if scenario in KEPT:
        assert pooled["plans"] > 1  # planned around what stays in the arena

"""Training that departs from its habits: the same results to the bit, and the plan is found again."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from processes import told_by

pytest.importorskip("torch", reason="PyTorch is not installed")

if TYPE_CHECKING:
    from collections.abc import Iterable

HERE = Path(__file__).resolve().parent
#: In which steps it departs from the habit; what lasts or recurs at a fixed distance, until that is planned.
DEPARTURES: dict[str, Iterable[int]] = {
    "extra_tensor": (9, 25),
    "logged_clones": (5, 13, 21, 29),
    "evaluation": (7, 19, 31),
    "last_batch": (11, 23),
    "lengths": (),
    "random_lengths": range(56),
    "any_lengths": range(56),
    "gathered": range(56),
    "exception": (9, 25),
    "out_of_memory": (9, 25),
    "second_model": range(20, 26),
    "saved": (9, 25),
    "frozen": (16,),
    "scheduled": (),
}
#: How many patterns recur, each of which has a plan.
PATTERNS = {
    "evaluation": 2,
    "last_batch": 2,
    "lengths": 2,
    "random_lengths": 4,
    "any_lengths": 2,
    "scheduled": 1,
}


@functools.cache
def runs(way: str, scenarios: tuple[str, ...], observer: str = "") -> dict[str, dict[str, Any]]:
    """Run scenarios one after the other in a process of their own."""
    return told_by(HERE / "diverging.py", way, observer, *scenarios)


@pytest.mark.parametrize(
    ("way", "scenario"), [*(("marked", scenario) for scenario in DEPARTURES), ("unmarked", "evaluation")]
)
def test_results_are_identical_and_the_plan_is_resumed_at_once(
    observer: str, way: str, scenario: str
) -> None:
    """With marks and without, nothing misses but in the iteration that departs, and the one after it."""
    every = tuple(DEPARTURES)
    plain = runs("plain", every)[scenario]
    pooled = runs(way, every if way == "marked" else (scenario,), observer)[scenario]
    assert pooled["losses"] == plain["losses"]
    assert pooled["parameters"] == plain["parameters"]
    assert pooled["kept"] == plain["kept"]
    assert pooled["overlaps"] == 0
    report = pooled["report"]
    assert report["state"] == "replaying"
    assert report["plan_active_at_iteration"] <= 8
    misses = [after - before for before, after in itertools.pairwise([0, *pooled["misses"]])]
    apart = {step + later for step in DEPARTURES[scenario] for later in (0, 1)}
    assert [(step, count) for step, count in enumerate(misses) if count and step not in apart] == []
    assert sum(misses) == report["misses"]
    if way == "marked" and scenario in PATTERNS:
        assert pooled["known"] == PATTERNS[scenario]
        assert report["plans"] <= 5 * PATTERNS[scenario]  # each, and four times all of them together

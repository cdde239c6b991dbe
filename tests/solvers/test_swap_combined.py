"""Combinations of the published scores by an optional library."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from swap_steps import step_from

from solvers import PlanError
from solvers.swap import Link, Step, SwapPlanner
from solvers.swap.weighted_scores import search_weights


class Study:
    """A study that draws weights, like a sampler without learning."""

    def __init__(self) -> None:
        self.random, self.told = np.random.default_rng(0), list[float]()

    def ask(self) -> SimpleNamespace:
        return SimpleNamespace(suggest_float=lambda _, low, high: self.random.uniform(low, high))

    def tell(self, _: object, value: float) -> None:
        self.told.append(value)


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Study:
    made = Study()
    optuna: Any = SimpleNamespace(
        create_study=lambda sampler: made,
        logging=SimpleNamespace(set_verbosity=lambda _: None, ERROR=40),
        samplers=SimpleNamespace(TPESampler=lambda **_: None),
    )
    monkeypatch.setitem(sys.modules, "optuna", optuna)
    return made


def hump() -> Step:
    size = [(1 + layer % 3) << 20 for layer in range(8)]
    return step_from([1.0] * 16, [(size[i], [(i, True), (15 - i, False)]) for i in range(8)])


LINK = Link(0.0, 1e-6, 0.0, 1e-6)


def test_search_tries_orders_of_the_same_rows(study: Study) -> None:
    orders = {"one": np.array([7, 3, 5], np.int32), "two": np.array([3, 5, 7], np.int32)}
    asked = list[list[int]]()

    def stall_of(order: np.ndarray) -> float:
        asked.append(order.tolist())
        return float("inf") if len(asked) % 2 else 3.0

    search_weights(orders, stall_of, trials=20)
    assert all(sorted(order) == [3, 5, 7] for order in asked)
    assert len({tuple(order) for order in asked}) > 2
    assert len(study.told) == 20
    assert np.isfinite(study.told).all()


def test_combined_scores_are_never_worse_and_unused_without_trials(study: Study) -> None:
    step = hump()
    for share in (0.4, 0.5, 0.7):
        limit = int(share * step.peak_bytes)
        alone = SwapPlanner(step, LINK, tries=0).hold(limit)
        assert not study.told
        both = SwapPlanner(step, LINK, tries=0, trials=10).hold(limit)
        assert len(study.told) == 10
        study.told.clear()
        assert both.stall_seconds <= alone.stall_seconds
        assert both.peak_bytes <= limit


def test_missing_optuna_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    step = hump()
    with pytest.raises(PlanError, match=r"pip install 'mempool\[bayes\]'"):
        SwapPlanner(step, LINK, trials=1).hold(step.peak_bytes // 2)


def test_optuna_finds_the_same_schedule_twice() -> None:
    pytest.importorskip("optuna", reason="Optuna is not installed")
    step = hump()
    first, second = (SwapPlanner(step, LINK, tries=0, trials=15).hold(step.peak_bytes // 2) for _ in "ab")
    assert first.schedule.release.tolist() == second.schedule.release.tolist()
    assert first.how == second.how

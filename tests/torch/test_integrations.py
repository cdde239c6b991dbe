"""Callbacks of `mempool.torch.integrations` in trainings by the real frameworks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import json_output_of

pytest.importorskip("torch", reason="PyTorch is not installed")

STEPS = 48
#: Number of iterations in which the planner learns the lengths, without a plan for all of them.
LEARNING = 12
#: Least hit rate after that. An iteration longer than all before misses, and changes the plan.
HITS = 0.85


@pytest.fixture(scope="module", params=["transformers", "lightning", "accelerate"])
def said(request: pytest.FixtureRequest) -> Any:
    """Return the results of a training with and without the callback of a framework."""
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("OMP_NUM_THREADS", "1"), ("CUDA_VISIBLE_DEVICES", ""), ("HF_HUB_OFFLINE", "1")):
            patch.setenv(name, value)
        return json_output_of(Path(__file__).with_name("integrated.py"), request.param)


def test_training_with_a_callback_is_bit_identical(said: Any) -> None:
    plain, pooled = said["plain"], said["pooled"]
    assert (pooled["losses"], pooled["parameters"]) == (plain["losses"], plain["parameters"])


def test_callback_ends_an_iteration_with_each_real_step(said: Any) -> None:
    assert said["pooled"]["iterations"] == said["pooled"]["metrics"]["steps"] == STEPS


def test_logger_gets_the_numbers_of_the_pool(said: Any) -> None:
    steps = [log["mempool/steps"] for log in said["pooled"]["logged"] if "mempool/steps" in log]
    assert len(steps) >= 4
    assert steps == sorted(steps)
    assert steps[-1] == STEPS
    numbers = {key for log in said["pooled"]["logged"] for key in log if key.startswith("mempool/")}
    assert {"mempool/hits", "mempool/hit_rate", "mempool/reserved_bytes"} <= numbers
    assert "mempool/state" not in numbers


def test_evaluation_follows_no_plan(said: Any) -> None:
    assert len(said["pooled"]["dynamic"]) >= 3
    assert all(said["pooled"]["dynamic"])
    assert said["pooled"]["phase"] == "training"


def test_history_of_transformers_has_the_numbers_of_the_pool(said: Any) -> None:
    assert said["pooled"].get("history", True)


@pytest.mark.parametrize("said", ["transformers"], indirect=True)  # its batches have many lengths
def test_trainer_with_varying_lengths_follows_its_plan(said: Any) -> None:
    assert len(set(said["plain"]["losses"])) > 1
    counts = said["pooled"]["outcomes"]
    new = {what: count - counts[LEARNING - 1].get(what, 0) for what, count in counts[-1].items()}
    assert new["hit"] >= HITS * sum(new.values())

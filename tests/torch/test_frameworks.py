"""Training by frameworks on PyTorch, whose optimizers stand around PyTorch's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import told_by

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

#: Iterations in which lengths are learned: nothing is planned before some of them have come, and the plan
#: that serves them all comes when more have.
LEARNING = 12
#: Of what is asked for after that. An iteration longer than all before it stands aside, and is planned for.
HITS = 0.85


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of a training with Trainer, and of one by the lines of the page."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("OMP_NUM_THREADS", "1"), ("CUDA_VISIBLE_DEVICES", ""), ("HF_HUB_OFFLINE", "1")):
            patch.setenv(name, value)
        return told_by(Path(__file__).with_name("trainer.py"))


def test_trainer_is_bit_identical(said: Any) -> None:
    plain, pooled = said["plain"], said["pooled"]
    assert len(set(plain["losses"])) > 1
    assert (pooled["losses"], pooled["parameters"]) == (plain["losses"], plain["parameters"])


def test_only_real_steps_of_an_accumulating_trainer_end_iterations(said: Any) -> None:
    pooled = said["pooled"]
    assert pooled["iterations"] == pooled["steps"] == len(pooled["losses"])


def test_trainer_with_varying_lengths_follows_its_plan(said: Any) -> None:
    counts = said["pooled"]["outcomes"]
    new = {what: count - counts[LEARNING - 1].get(what, 0) for what, count in counts[-1].items()}
    assert new["hit"] >= HITS * sum(new.values())

"""What must hold on a GPU: see checks.py."""

from __future__ import annotations

import json

import compare
import pytest
import runs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch_gpu")]


@pytest.mark.parametrize("check", compare.CHECKS)
def test_check_holds_with_pytorch(check: str) -> None:
    answer, error = runs.told("checks.py", check)
    assert (answer, error) == ("holds", "")


@pytest.mark.parametrize("workload", compare.NAMES)
def test_training_is_the_same_to_the_bit(workload: str) -> None:
    told = {
        way: json.loads(runs.told("worker.py", way, workload)[0]) for way in ("native", "mempool", "growing")
    }
    assert len({way["losses"] for way in told.values()}) == 1

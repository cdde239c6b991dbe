"""Training within limits on a GPU: the same bits as without, and no more memory than was said."""

from __future__ import annotations

import json
from typing import Any

import pytest
import runs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("torch_gpu")]


def trained(way: str, model: str, limit: int = 0) -> dict[str, Any]:
    line, error = runs.told("limited.py", way, model, str(limit), seconds=250)
    assert error == "", (way, limit)
    told: dict[str, Any] = json.loads(line)
    return told


@pytest.mark.parametrize("model", ["resnet", "gpt", "seq2seq", "llama"])
def test_swapping_changes_no_bit(model: str) -> None:
    native, pool = trained("native", model), trained("pool", model)
    assert (pool["losses"], pool["parameters"]) == (native["losses"], native["parameters"])
    limit = int(0.8 * pool["peak_bytes"])
    swapped = trained("swapping", model, limit)
    assert (swapped["losses"], swapped["parameters"]) == (native["losses"], native["parameters"])
    assert swapped["peak_bytes"] <= limit


@pytest.mark.parametrize("way", ["swapping", "streams"])
@pytest.mark.parametrize("model", ["resnet", "gpt"])
def test_operations_that_are_not_seen_change_no_bit(way: str, model: str) -> None:
    native = trained("native", model)
    within = trained(way, model, 4 * trained("pool", model)["peak_bytes"])
    assert (within["losses"], within["parameters"]) == (native["losses"], native["parameters"])
    assert within["bypassed"] > 0


@pytest.mark.parametrize("model", ["resnet", "gpt", "bert"])
@pytest.mark.parametrize("way", ["eager", "inductor"])
def test_rewriting_changes_no_bit(way: str, model: str) -> None:
    free = trained(way, model)
    limit = int(0.8 * free["peak_bytes"])
    within = trained(way, model, limit)
    assert (within["losses"], within["parameters"]) == (free["losses"], free["parameters"])
    assert within["peak_bytes"] <= limit

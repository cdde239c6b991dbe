"""Compiled graphs with offloads under a pool."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from compiled_programs import adamw_state_bytes, compiled
from training import MODELS, Setup, run

import mempool.torch.compiled
from mempool.torch.compiled.runtime import RUNTIME, TransferCounters


def test_pool_replays_compiled_graphs_with_offloads(one_thread: None) -> None:
    """Every allocation hits, and losses are bit-identical."""
    options: dict[str, Any] = {"inner": "eager", "link": "pcie3"}

    def training(given: dict[str, Any], *, pooled: bool) -> dict[str, Any]:
        torch._dynamo.reset()
        RUNTIME.counters = TransferCounters()
        return run(Setup("resnet", size=2, steps=7, rewriting=given), None, pooled=pooled)

    model = MODELS["resnet"]()
    compiled(model.loss, {**options, "limit": 1 << 40})(*model.batch(0, 2))
    plain = mempool.torch.compiled.report().graphs[-1]["plain_peak_bytes"]
    expected = training({"inner": "eager"}, pooled=False)
    kept = adamw_state_bytes(model)
    got = training({**options, "limit": int(0.9 * plain) + kept, "beside": kept}, pooled=True)
    assert RUNTIME.counters.reloads > 0
    assert got["losses"] == expected["losses"]
    assert got["parameters"] == expected["parameters"]
    report = got["report"]
    assert (report["state"], report["misses_total"], report["hit_rate"]) == ("replaying", 0, 1.0)
    assert report["planned_arena_bytes"] <= 1.01 * report["peak_load_bytes"]

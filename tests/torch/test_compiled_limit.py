"""Limits in bytes: held by the pool's count, bit-identical, or refused before training."""

from __future__ import annotations

import gc
import json
import re
import time
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from compiled_programs import compiled, same
from torch import nn

import mempool.torch
import mempool.torch.compiled
from mempool.torch.compiled.runtime import RUNTIME

if TYPE_CHECKING:
    from mempool.torch import TensorPool


pytestmark = pytest.mark.usefixtures("no_vectors", "few_objects")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.convolutions:
            x = self.norm(layer(x).relu()) + x.sigmoid()
        return self.head(nn.functional.dropout(x, 0.3).mean((2, 3)))


def step_of(
    pool: TensorPool, options: dict[str, Any], make: type[Net] = Net
) -> tuple[list[torch.Tensor], int]:
    """Return gradients and results of a second training step, and the peak bytes."""
    torch.manual_seed(0)
    gc.collect()
    before = pool.client.stats()["requested"]["current"]
    model = make()
    run = compiled(lambda x: model(x).square().mean(), options)
    for _ in range(2):
        x = torch.randn(8, 4, 32, 32, generator=torch.Generator().manual_seed(1))
        model.zero_grad()
        pool.client.reset_peaks()
        loss = run(x)
        loss.backward()
    peak = pool.client.stats()["requested"]["peak"] - before
    return [loss.detach(), *(p.grad for p in model.parameters()), *model.buffers()], peak


def least_of(options: dict[str, Any]) -> int:
    """Return the least limit that a refusal names."""
    with pytest.raises(Exception, match=r"no step fits in .* needs") as refused:
        compiled(Net(), options)(torch.randn(8, 4, 32, 32)).sum().backward()
    (least,) = re.findall(r"needs ([\d,]+)", str(refused.value))
    return int(least.replace(",", ""))


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of PyTorch's own modules
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_limit_is_held_and_bit_identical(inner: str, pool: TensorPool) -> None:
    options = {"inner": inner}
    plain, peak = step_of(pool, options)
    torch.manual_seed(0)
    least = least_of({**options, "limit": 1000})
    assert least < 0.8 * peak
    got, taken = step_of(pool, {**options, "limit": least, "link": "pcie3"})
    assert same(got, plain)
    assert taken <= least
    assert RUNTIME.counters.offloads > 0
    assert RUNTIME.host_copies == 0


class Broken(Net):
    """A model with a graph break."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.convolutions[:2]:
            x = self.norm(layer(x).relu()) + x.sigmoid()
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of PyTorch's own modules
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_graphs_of_a_function_share_the_limit(inner: str, pool: TensorPool) -> None:
    """Both graphs together hold the limit."""
    options = {"inner": inner}
    plain, peak = step_of(pool, options, Broken)
    limit = int(0.8 * peak)
    got, taken = step_of(pool, {**options, "limit": limit, "link": "pcie3"}, Broken)
    assert same(got, plain)
    assert taken <= limit
    said = mempool.torch.compiled.report()
    ours = [graph for graph in said.graphs if graph["limit_bytes"] == limit]
    assert len(ours) > 1
    assert all(graph["predicted_peak_bytes"] <= limit for graph in ours)
    assert len({graph["function"] for graph in ours}) == len(ours)
    assert ours[0]["function"] in str(said)
    assert ours[0]["outside_bytes"] < ours[1]["outside_bytes"]
    assert json.dumps(said.to_dict())
    assert "values offloaded" in str(said)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of PyTorch's own modules
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_report_measures_both_graphs(inner: str) -> None:
    """Time between the graphs does not count."""
    limit = 1 << 30
    net = Net()
    run = compiled(net, {"inner": inner, "limit": limit})
    batch = torch.randn(8, 4, 32, 32)

    def told() -> dict[str, Any]:
        return next(g for g in mempool.torch.compiled.report().graphs[::-1] if g["limit_bytes"] == limit)

    loss = run(batch).square().sum()
    assert told()["measured_seconds"] is None
    assert "not run yet" in str(mempool.torch.compiled.report())
    loss.backward()
    begun, pause = time.perf_counter(), 0.02
    for _ in range(32):  # the first run is forgotten
        loss = run(batch).square().sum()
        time.sleep(pause)
        loss.backward()
    whole = time.perf_counter() - begun - 32 * pause
    assert 0 < told()["measured_seconds"] <= whole / 16  # of medians: half of the runs took as long
    assert f"measured {told()['measured_seconds']:.4f} s" in str(mempool.torch.compiled.report())


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of PyTorch's own modules
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_cublas_workspaces_count_for_training(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One workspace for the forward thread and one for the backward thread."""
    options = {"inner": inner, "limit": 1000}
    least = least_of(options)
    monkeypatch.setattr("mempool.torch.compiled.costs.cublas_workspace_bytes", lambda _: 1 << 20)
    assert least_of(options) == least + (2 << 20)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of PyTorch's own modules
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_cublas_workspaces_count_for_inference(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:

    def needed() -> int:
        with torch.no_grad(), pytest.warns(UserWarning, match="no backward pass") as said:
            compiled(Net(), {"inner": inner, "limit": 1000})(torch.randn(8, 4, 32, 32))
        texts = [str(one.message) for one in said if "no backward pass" in str(one.message)]
        return max(int(number) for text in texts for number in re.findall(r"needs (\d+) bytes", text))

    least = needed()
    monkeypatch.setattr("mempool.torch.compiled.costs.cublas_workspace_bytes", lambda _: 1 << 20)
    assert needed() == least + (1 << 20)

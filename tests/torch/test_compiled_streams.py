"""Copies on streams: right bytes in any stream order, and no leaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from compiled_programs import ALL, compiled
from fake_streams import FakeRuntime

import mempool.torch
from mempool.torch.compiled.runtime import RUNTIME, empty_tensor
from mempool.torch.offload.cuda_engine import CudaEngine

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

CPU = torch.device("cpu")


def waves(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = (x.exp().sin() * x.cos()).tanh() + x
    return x


def point(seed: int) -> torch.Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], FakeRuntime]:
    """Install an engine whose streams run in an order drawn from a seed."""

    def of(seed: int) -> FakeRuntime:
        device = FakeRuntime(seed, eager=True)
        monkeypatch.setitem(RUNTIME.engines, (CPU, 0), CudaEngine(CPU, 1 << 24, runtime=device))
        return device

    return of


def test_gradients_are_right_for_any_stream_order(streams: Callable[[int], FakeRuntime]) -> None:
    streams(0)
    run = compiled(waves, {**ALL, "link": "pcie3"})
    for seed in range(12):
        device = streams(seed)
        results = [(x := point(number), run(x).sum()) for number in range(3)]
        for number in (1, 0, 2):
            x, result = results[number]
            y = point(number)
            result.backward()
            assert torch.equal(x.grad, torch.autograd.grad(waves(y).sum(), y)[0])
        del results, result
        device.finish()
        assert RUNTIME.host_copies == 0
    assert RUNTIME.counters.reloads > 0


def test_unpinnable_host_keeps_values_on_the_device(
    streams: Callable[[int], FakeRuntime],
) -> None:
    device = streams(0)
    device._lockable = 0
    x, y = point(0), point(0)
    with pytest.warns(UserWarning, match="host has no room"):
        compiled(waves, {**ALL, "link": "pcie3"})(x).sum().backward()
    assert RUNTIME.counters.host_full > 0
    assert torch.equal(x.grad, torch.autograd.grad(waves(y).sum(), y)[0])


@pytest.mark.parametrize("deterministic", [False, True])
def test_reload_buffers_come_from_the_pool(deterministic: bool) -> None:
    """Deterministic mode included."""
    torch.use_deterministic_algorithms(deterministic)
    try:
        with mempool.torch.install(device="cpu", mode="record") as pool:
            before = pool.client.stats()["requested"]["current"]
            made = empty_tensor((64, 3), (3, 1), torch.float64, CPU)
            assert pool.client.stats()["requested"]["current"] - before == made.nbytes
    finally:
        torch.use_deterministic_algorithms(False)

"""Copies of compiled graphs on streams and at planned offsets: right bytes, and no leaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from typing import Any

from compiled_programs import ALL, compiled
from fake_streams import FakeRuntime
from hypothesis import given
from hypothesis import strategies as st
from rewriting_graphs import graphs, rewritings

import mempool.torch
from mempool.torch.compiled.decide import place_copies
from mempool.torch.compiled.runtime import RUNTIME, empty_tensor
from mempool.torch.offload.cuda_engine import CudaEngine
from mempool.torch.offload.host_engine import ArenaCopy, HostEngine
from mempool.torch.offload.host_memory import PAGE, pages
from mempool.torch.offload.options import OPTIONS
from mempool.torch.offload.pinned_memory import PinnedArena

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


@pytest.mark.usefixtures("everything_leaves")
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


@pytest.mark.usefixtures("everything_leaves")
def test_host_memory_is_returned_after_steps_without_use(streams: Callable[[int], FakeRuntime]) -> None:
    device, run = streams(0), compiled(waves, {**ALL, "link": "pcie3"})
    for size in (1 << 20, 2 << 20):  # two parts, of which copies take the first
        RUNTIME.engines[CPU, 0].reserve(size)
    for _ in range(OPTIONS.pinned_idle_iterations + 2):
        run(point(0)).sum().backward()
        device.finish()
    assert RUNTIME.host_bytes == 1 << 20


@pytest.mark.usefixtures("everything_leaves")
def test_full_host_keeps_values_on_the_device(
    streams: Callable[[int], FakeRuntime], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PinnedArena, "grow", lambda *_: False)
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


@given(st.data())
def test_placed_copies_never_overlap(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    rewriting = data.draw(rewritings(graph, recompute=False))
    places = place_copies(graph, rewriting)
    assert places.at.keys() == {swap.value for swap in rewriting.offloads}
    begins, ends = {}, {}
    for swap in rewriting.offloads:
        begins[swap.value] = int(graph.producer[swap.value])
        ends[swap.value] = max((run for one in swap.reloads for run in one.consumers), default=len(graph))
        at, size = places.at[swap.value], pages(int(graph.size[swap.value]))
        assert at % PAGE == 0
        assert 0 <= at <= at + size <= places.size
    some = [value for value in places.at if graph.size[value]]
    for one in some:
        for other in some:
            if one < other and begins[one] <= ends[other] and begins[other] <= ends[one]:
                lengths = {value: pages(int(graph.size[value])) for value in (one, other)}
                first, second = sorted((one, other), key=lambda value: places.at[value])
                assert places.at[first] + lengths[first] <= places.at[second]
    assert places.shift(8 * PAGE).at == {value: at + 8 * PAGE for value, at in places.at.items()}


class Placed(HostEngine):
    """A host engine that counts copies at planned and at other offsets."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.right = self.wrong = 0

    def _allocate(self, size: int, at: int) -> ArenaCopy:
        copied = super()._allocate(size, at)
        if at >= 0:  # else it is measured what copies take
            self.right, self.wrong = self.right + (copied.at == at), self.wrong + (copied.at != at)
        return copied


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Placed]:
    """Install a counting host engine."""
    made = Placed(1 << 26)
    monkeypatch.setitem(RUNTIME.engines, (CPU, 0), made)
    yield made
    made.close()


def sines(x: torch.Tensor) -> torch.Tensor:
    for width in (256, 128, 256):
        x = (x.exp().sin() * x.cos()).tanh()
        x = x @ torch.full((x.shape[1], width), 1 / width)
    torch._dynamo.graph_break()
    for _ in range(3):
        x = (x.exp().sin() * x.cos()).tanh()
    return x


@pytest.mark.usefixtures("everything_leaves")
@pytest.mark.parametrize("options", [{}, {"link": "pcie3"}], ids=["at once", "beside"])
def test_copies_lie_at_their_planned_offsets(options: dict[str, Any], engine: Placed) -> None:
    """Copies of two graphs have separate ranges."""
    run = compiled(sines, ALL | options)
    for _ in range(3):
        x = torch.randn(64, 64, requires_grad=True)
        run(x).sum().backward()
    assert engine.right > 20
    assert engine.wrong == 0

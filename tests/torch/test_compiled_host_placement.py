"""Planned offsets of host copies, and copies at their planned offsets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from compiled_programs import PLAIN, compiled
from rewriting_graphs import graphs, rewritings

from mempool.torch.compiled.decide import place_copies
from mempool.torch.compiled.runtime import RUNTIME
from mempool.torch.offload.host_engine import ArenaCopy, HostEngine
from mempool.torch.offload.host_memory import PAGE, pages

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

CPU = torch.device("cpu")


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
    assert places.shifted(8 * PAGE).at == {value: at + 8 * PAGE for value, at in places.at.items()}


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


def waves(x: torch.Tensor) -> torch.Tensor:
    for width in (256, 128, 256):
        x = (x.exp().sin() * x.cos()).tanh()
        x = x @ torch.full((x.shape[1], width), 1 / width)
    torch._dynamo.graph_break()
    for _ in range(3):
        x = (x.exp().sin() * x.cos()).tanh()
    return x


@pytest.mark.parametrize("options", [{}, {"link": "pcie3"}], ids=["at once", "beside"])
def test_copies_lie_at_their_planned_offsets(options: dict[str, Any], engine: Placed) -> None:
    """Copies of two graphs have separate ranges."""
    run = compiled(waves, {**PLAIN, "threshold": 0, **options})
    for _ in range(3):
        x = torch.randn(64, 64, requires_grad=True)
        run(x).sum().backward()
    assert engine.right > 20
    assert engine.wrong == 0

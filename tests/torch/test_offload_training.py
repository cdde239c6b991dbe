"""Training with swapping is training: the same bits, within the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from models import MODELS

from mempool.torch.eager.mode import OffloadMode
from mempool.torch.offload.host_engine import HostEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def engine() -> Iterator[HostEngine]:
    engine = HostEngine(1 << 30)
    yield engine
    engine.close()


def train(name: str, steps: int = 4) -> list[Any]:
    """The losses, then the parameters."""
    torch.manual_seed(0)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model.loss(*model.batch(step, 8))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return [losses, *(p.detach().clone() for p in model.parameters())]


def same(one: list[Any], other: list[Any]) -> bool:
    return one[0] == other[0] and all(torch.equal(a, b) for a, b in zip(one[1:], other[1:], strict=True))


def peak(name: str, engine: HostEngine) -> int:
    """Bytes of the largest load of an iteration like any other, and what is always there."""
    with OffloadMode(engine, CPU, 1 << 40) as mode:
        train(name, 2)
    return mode.counts.peak_bytes


@pytest.mark.parametrize("name", ["resnet", "gpt"])
def test_training_is_bit_identical_within_any_limit(name: str, engine: HostEngine) -> None:
    plain, whole = train(name), peak(name, engine)
    for share in (0.8, 0.6):
        with OffloadMode(engine, CPU, int(whole * share)) as mode:
            assert same(train(name), plain)
        assert mode.counts.out_bytes > 0
        assert mode.counts.in_bytes > 0


def test_storages_are_resident_after_the_mode_ends(engine: HostEngine) -> None:
    with OffloadMode(engine, CPU, 3 * MIB):
        kept = [torch.full((MIB // 4,), float(i)) for i in range(8)]
        assert sum(torch._C.StorageBase.nbytes(t.untyped_storage()) for t in kept) <= 3 * MIB
    assert [t.mean().item() for t in kept] == [float(i) for i in range(8)]

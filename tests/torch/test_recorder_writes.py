"""Operations that write what their schema says they read are known to write it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.utils._python_dispatch import TorchDispatchMode

from mempool.recording.torch.ledger import storages_in, tensors_in
from mempool.recording.torch.operations import learn


class Compared(TorchDispatchMode):
    """Compares the bytes of all arguments before and after each operation with what is known of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.unsaid: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = learn(func)
        written = {
            id(storage)
            for a in operation.arguments
            if a.written
            for _, storage in storages_in(args[a.position] if a.position < len(args) else kwargs.get(a.name))
        }
        before = [(tensor, tensor.clone()) for tensor in tensors_in((args, kwargs))]
        result = func(*args, **kwargs)
        self.seen.add(operation.name)
        for tensor, bytes_before in before:
            changed = not torch.equal(tensor.detach().nan_to_num(), bytes_before.nan_to_num())
            if changed and id(tensor.untyped_storage()) not in written:
                self.unsaid.append(operation.name)
        return result


@pytest.mark.parametrize("training", [True, False])
def test_every_write_of_a_step_is_known(training: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv1d(3, 4, 3),
        torch.nn.BatchNorm1d(4),
        torch.nn.RReLU(),
        torch.nn.Dropout(0.5),
        torch.nn.InstanceNorm1d(4, track_running_stats=True),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(4),
    )
    batch = torch.randn(5, 3, 8)
    model(batch)
    model.train(training)
    optimizer = torch.optim.AdamW(model.parameters())
    with Compared() as compared:
        for _ in range(2):
            model(batch).sum().backward()
            optimizer.step()
    assert compared.unsaid == []
    assert any("batch_norm" in name for name in compared.seen)


def test_every_write_of_a_recurrent_layer_is_known() -> None:
    layer = torch.nn.LSTM(3, 4)
    with Compared() as compared:
        out = layer(torch.randn(5, 2, 3))[0].sum()
        for _ in range(2):
            out.backward(retain_graph=True)
    assert compared.unsaid == []


def test_running_statistics_that_are_only_read_are_not_written() -> None:
    for name in ("native_batch_norm_backward", "_native_batch_norm_legit_no_training"):
        assert not any(a.written for a in learn(getattr(torch.ops.aten, name).default).arguments)

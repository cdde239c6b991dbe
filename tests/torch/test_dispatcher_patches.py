"""Tensors that C++ code reads between operations or writes to files are resident first."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import scripts
from adversary import Adversary
from torch import nn

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]


@pytest.fixture
def mode() -> Iterator[Adversary]:
    with Adversary(0, share=0.9) as mode:
        yield mode


def packed() -> Any:
    """Return sequences packed during training: sorted, with batch sizes."""
    lengths = torch.randint(5, 9, (4,)).sort(descending=True).values
    sizes = (lengths[None] > torch.arange(int(lengths[0]))[:, None]).sum(1)
    return nn.utils.rnn.PackedSequence(torch.randn(int(sizes.sum()), 3), sizes)


def rnn(kind: type[nn.RNNBase]) -> Callable[[Callable[[], None]], list[float]]:
    def trained(disturb: Callable[[], None]) -> list[float]:
        torch.manual_seed(0)
        layer, data = kind(3, 4, bidirectional=True), packed()
        disturb()
        out, _ = nn.utils.rnn.pad_packed_sequence(layer(data)[0])
        disturb()
        out.square().mean().backward()
        return [out.sum().item(), *(parameter.grad.sum().item() for parameter in layer.parameters())]

    return trained


def split(disturb: Callable[[], None]) -> list[int]:
    offsets, x = torch.arange(1, 600, 2), torch.arange(700.0)
    disturb()
    parts = torch.tensor_split(x, offsets)
    disturb()
    return [len(part) for part in (*parts, *x.tensor_split(offsets))]


def state(disturb: Callable[[], None]) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    kept = generator.get_state().clone()
    torch.rand(5, generator=generator)
    disturb()
    generator.set_state(kept)
    return [int(n) for n in torch.randperm(9, generator=generator)]


def scripted(name: str) -> Callable[[Callable[[], None]], list[float]]:
    def called(disturb: Callable[[], None]) -> list[float]:
        function, x = getattr(scripts, name)(), torch.arange(1000.0) * 2
        disturb()
        numbers: list[float] = function(x)
        return numbers

    return called


def saved(save: Callable[[Any, Any], None]) -> Callable[[Callable[[], None]], list[float]]:
    def restored(disturb: Callable[[], None]) -> list[float]:
        torch.manual_seed(0)
        module, file = torch.jit.script(nn.Linear(40, 40)), io.BytesIO()
        module(torch.ones(2, 40))
        disturb()
        save(module, file)
        file.seek(0)
        return [parameter.sum().item() for parameter in torch.jit.load(file).parameters()]

    return restored


PROGRAMS: dict[str, Callable[[Callable[[], None]], list[Any]]] = {
    "lstm": rnn(nn.LSTM),
    "gru": rnn(nn.GRU),
    "rnn": rnn(nn.RNN),
    "tensor_split": split,
    "generator": state,
    "script": scripted("function"),
    "scripted module": scripted("module"),
    "save": saved(torch.jit.save),
    "buffer": saved(lambda module, file: file.write(module.save_to_buffer())),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_accesses_past_the_dispatcher_find_resident_storages(name: str, mode: Adversary) -> None:
    got = PROGRAMS[name](mode.offload_all)
    with torch.utils._python_dispatch._disable_current_modes():
        plain = PROGRAMS[name](lambda: None)
    assert got == plain
    assert mode.counts.out_bytes


def test_torchscript_pickle_holds_offloaded_values(mode: Adversary) -> None:
    x = torch.arange(1000.0) * 2
    mode.offload_all()
    data = torch._C._pickle_save([x])
    assert x.numpy().tobytes() in bytes(data)


@pytest.mark.usefixtures("mode")
def test_entry_of_a_typed_storage_brings_a_single_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.storage, "_always_warn_typed_storage_removal", True)
    storage = torch.storage.TypedStorage([0, 7], dtype=torch.int64, _internal=True)
    with pytest.warns(UserWarning, match="TypedStorage is deprecated") as warned:
        number = storage[1]
    assert (number, len(warned)) == (7, 1)

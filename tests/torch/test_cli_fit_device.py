"""``mempool fit`` and `mempool.torch.fit` agree on each device, and a CPU's answer is not that of CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mempool.torch
from mempool.recording.torch import AccessRecorder
from mempool.torch.estimate.device.emulation import emulate_device, emulated_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("shared_isolation")

WIDTH = 32
MODULE = """
import torch
from torch import nn

class Attention(nn.Module):
    def forward(self, x):
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2)

class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner = kind(32, 32, batch_first=True)
    def forward(self, x):
        return self.inner(x)[0]

LAYERS = {
    "linear": lambda: nn.Linear(32, 32), "dropout": lambda: nn.Dropout(0.1),
    "norm": lambda: nn.LayerNorm(32), "tanh": nn.Tanh, "attention": Attention,
    "lstm": lambda: Recurrent(nn.LSTM), "gru": lambda: Recurrent(nn.GRU),
}

class Net(nn.Module):
    def __init__(self, names="linear"):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), *(LAYERS[name]() for name in names.split()))
    def forward(self, x):
        return self.layers(x)
"""
LAYERS = ("linear", "dropout", "norm", "tanh", "attention", "lstm", "gru")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("devices")
    (path / "layered.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.syspath_prepend(str(path))
        yield path


def net(names: str) -> nn.Module:
    namespace: dict[str, Any] = {"__name__": "own"}
    exec(MODULE, namespace)
    made: nn.Module = namespace["Net"](names)
    return made


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.filterwarnings("ignore:Using a target size")
@settings(deadline=None, max_examples=12, suppress_health_check=["function_scoped_fixture"])
@given(
    layers=st.lists(st.sampled_from(LAYERS), min_size=1, max_size=5),
    optimizer=st.sampled_from(("AdamW", "SGD")),
    autocast=st.sampled_from((None, torch.bfloat16)),
    batch=st.integers(1, 64),
)
def test_command_and_python_call_agree_on_each_device(
    folder: Path,
    fit_json: Any,
    device: str,
    layers: Sequence[str],
    optimizer: str,
    autocast: torch.dtype | None,
    batch: int,
) -> None:
    names = " ".join(layers)
    lower = [] if autocast is None else ["--autocast", "bfloat16"]
    form = ("--inputs", "float32[B,16,32]", "--batch", str(batch), "--device", device)
    target = f"layered.py:Net(names='{names}')"
    command = fit_json(target, *form, "--optimizer", optimizer.lower(), *lower)
    python = mempool.torch.fit(
        lambda: net(names), torch.zeros(batch, 16, WIDTH), getattr(torch.optim, optimizer),
        device=device, autocast=autocast,
    )  # fmt: skip
    assert command["device"] == device
    for name in ("peak_bytes", "by_class_bytes", "reserved_bytes", "by_phase_bytes", "margin_bytes"):
        assert command[name] == getattr(python, name)


def test_device_of_a_function_counts_where_the_command_names_none(folder: Path, fit_json: Any) -> None:
    make = "def make():\n    return {'model': Net('dropout tanh'), 'inputs': torch.zeros(64, 16, 32)%s}\n"
    for name, more in {"told": ", 'device': 'cpu'", "untold": ""}.items():
        (folder / f"{name}.py").write_text("from layered import *\n" + make % more)
    told, asked = (fit_json("told.py"), fit_json("untold.py", "--device", "cpu"))
    assert told["peak_bytes"] == asked["peak_bytes"] > fit_json("untold.py")["peak_bytes"]


def test_nested_devices_take_back_and_restore_the_kernels() -> None:
    def dropout_mask_bytes() -> int:
        with AccessRecorder() as recorder:
            F.dropout(torch.empty(1024), 0.5, training=True)
        return int(recorder.trace().load().max())

    init = torch.amp.autocast_mode.autocast.__init__
    with FakeTensorMode():
        plain = dropout_mask_bytes()
        with emulate_device("cuda"):
            cuda = dropout_mask_bytes()
            with emulate_device("cpu"):
                assert (dropout_mask_bytes(), emulated_device()) == (plain, "cpu")
                with emulate_device("cuda"), emulate_device("cuda"):
                    assert (dropout_mask_bytes(), emulated_device()) == (cuda, "cuda")
            assert (dropout_mask_bytes(), emulated_device()) == (cuda, "cuda")
        assert cuda < plain == dropout_mask_bytes()
    assert emulated_device() is None
    assert torch.amp.autocast_mode.autocast.__init__ is init

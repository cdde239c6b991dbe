"""Estimates of unusual models and inputs, or a single line that names the obstacle."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import mempool.torch
from mempool.errors import UsageError
from mempool.torch.estimate.fake.fake_run import SUMMED
from mempool.torch.estimate.fit import batch_of, call_arguments, resizable

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.torch.estimate import Fit

pytestmark = pytest.mark.usefixtures("shared_isolation")

X, ONES = torch.zeros(8, 16), torch.ones(16)

_library = torch.library.Library("mempool_test", "DEF")
_library.define("without_fake(Tensor x) -> Tensor")
_library.impl("without_fake", lambda x: x * 2, "CPU")


class Odd(nn.Module):
    """A layer with an unusual function in its forward pass."""

    def __init__(self, does: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.does = nn.Linear(16, 16), does

    def forward(self, x: Tensor) -> Any:
        return self.does(self.layer, x)


def tried(does: Callable[[Any, Tensor], Any], **options: Any) -> Fit:
    return mempool.torch.fit(Odd(does), X, **options)


def looks_into(layer: nn.Module, x: Tensor) -> Tensor:
    h = layer(x)
    return h * 2 if h.sum().item() > 0 else h


def decides(layer: nn.Module, x: Tensor) -> Tensor:
    h = layer(x)
    return h * 2 if (h > 0).all() else h


REFUSED = {
    "item": (looks_into, "a value is read"),
    "condition": (decides, "a value is read"),
    "tolist": (lambda layer, x: layer(x) * sum(layer(x).sum(1).tolist()), "a value is read"),
    "mask": (lambda layer, x: layer(x)[x[:, 0] > 0], "nonzero"),
    "unique": (lambda layer, x: layer(x) * torch.unique(x).numel(), "unique"),
    "numpy": (lambda layer, x: layer(x) * float(np.mean(x.numpy())), "NumPy"),
    "own operator": (lambda layer, x: torch.ops.mempool_test.without_fake(layer(x)), "no fake kernel"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("mode", ["train", "inference"])
def test_unknown_values_are_refused_with_their_place(what: str, mode: str) -> None:
    does, says = REFUSED[what]
    with pytest.raises(UsageError, match=says) as caught:
        tried(does, mode=mode)
    told = str(caught.value)
    assert "\n" not in told
    assert "(Odd)" in told
    assert f"{Path(__file__).name}:{does.__code__.co_firstlineno}"[:-2] in told


def test_module_reading_a_value_is_named() -> None:
    with pytest.raises(UsageError, match=r"in module 1\.0 \(Odd\)"):
        mempool.torch.fit(nn.Sequential(nn.Linear(16, 16), nn.Sequential(Odd(looks_into))), X)


def replaces_its_parameter(layer: Any, x: Tensor) -> Tensor:
    layer.weight = nn.Parameter(layer.weight * 0.9)
    return layer(x)


def computes_again(layer: Any, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)


def computes_again_in_the_old_way(layer: Any, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(layer, x.clone().requires_grad_(), use_reentrant=True)


def lowers(layer: Any, x: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.float16):
        return layer(x)


ALIKE = {
    "cuda()": lambda layer, x: layer(x.cuda()),
    "to a device": lambda layer, x: layer(x.to(torch.device("cuda:0"))),
    "a copied module": lambda layer, x: layer.cuda()(x),
    "a dictionary": lambda layer, x: {"logits": layer(x), "number": 3, "none": None},
    "a nested tuple": lambda layer, x: ((layer(x),), []),
    "an object": lambda layer, x: SimpleNamespace(logits=layer(x), number=3),
}
TRIED = {
    "a generator": lambda layer, x: ({"out": layer(x)} for _ in range(3)),
    "complex": lambda layer, x: torch.fft.fft(layer(x)),
    "random": lambda layer, x: layer(x) + torch.randn(8, 16) + torch.rand_like(x),
    "made on cuda": lambda layer, x: layer(x) + torch.zeros(16, device="cuda"),
    "a replaced parameter": replaces_its_parameter,
    "in place": lambda layer, x: layer(x).mul_(2).add_(1),
    "checkpointed": computes_again,
    "checkpointed in the old way": computes_again_in_the_old_way,
    "autocast": lowers,
    "interpolated": lambda layer, x: F.interpolate(layer(x)[:, None], scale_factor=2),
    "a real constant": lambda layer, x: layer(x) * ONES,
}


@pytest.mark.parametrize("what", ALIKE)
def test_equivalent_spellings_give_the_same_estimate(what: str) -> None:
    told = {
        key: tried(does).to_dict()
        for key, does in (("plain", lambda layer, x: layer(x)), ("odd", ALIKE[what]))
    }
    assert told["odd"] == told["plain"]


@pytest.mark.parametrize("what", TRIED)
def test_unusual_models_are_estimated(what: str) -> None:
    fit = tried(TRIED[what])
    assert sum(fit.by_class_bytes.values()) == fit.peak_bytes > 4 * 512


class Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


@pytest.mark.parametrize("real", [True, False])
def test_tied_weights_count_once(real: bool) -> None:
    words = torch.zeros(4, 3, dtype=torch.long)
    tied, apart = (
        mempool.torch.fit(Tied(tied=way) if real else lambda way=way: Tied(tied=way), words)
        for way in (True, False)
    )
    one = -(-50 * 16 * 4 // 512) * 512
    assert apart.by_class_bytes["parameters"] - tied.by_class_bytes["parameters"] == one


def test_frozen_parameters_have_neither_gradients_nor_state() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).requires_grad_(False)
    model[1].requires_grad_()
    fit = mempool.torch.fit(model, X)
    assert fit.by_class_bytes["parameters"] == 2 * (1024 + 512)
    assert fit.by_class_bytes["optimizer_state"] == 2 * (1024 + 512) + 2 * 512  # with counts of steps
    with pytest.raises(UsageError, match="nothing to train"):
        mempool.torch.fit(model.requires_grad_(False), X)


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD])
def test_sparse_gradients_are_small(optimizer: Any) -> None:
    words = torch.zeros(4, 3, dtype=torch.long)
    sparse, dense = (
        mempool.torch.fit(
            nn.Embedding(10_000, 16, sparse=way), words, torch.optim.SGD if not way else optimizer
        )
        for way in (True, False)
    )
    table = 10_000 * 16 * 4
    state = sparse.by_class_bytes.get("optimizer_state", 0)
    assert sparse.peak_bytes - state < 1.1 * table
    assert dense.peak_bytes > 2 * table


def test_modules_whose_sizes_are_not_known_are_refused() -> None:
    with pytest.raises(UsageError, match="lazy"):
        mempool.torch.fit(nn.LazyLinear(4), X)
    with pytest.raises(UsageError, match="lazy"):
        mempool.torch.fit(lambda: nn.LazyLinear(4), X)


def test_models_with_copied_layers_are_estimated() -> None:
    layer = lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)  # noqa: E731
    inputs = torch.zeros(4, 8, 16)
    made, real = (
        mempool.torch.fit(model, inputs).to_dict()
        for model in (lambda: nn.TransformerEncoder(layer(), 3), nn.TransformerEncoder(layer(), 3))
    )
    assert made == real


def test_exceptions_of_user_code_pass_with_a_note() -> None:
    with pytest.raises(RuntimeError, match=r"\[8, 3\]|size|shape|dim") as caught:
        tried(lambda layer, x: layer(x[:, :3]))
    (note,) = caught.value.__notes__
    assert "in module layer (Linear)" in note
    assert Path(__file__).name in note


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "dream"}, "no mode 'dream'"),
        ({"device": "tpu"}, "no device 'tpu'"),
        ({"batch": 0}, "batch is 0"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)])}, "give its class"),
        ({"optimizer": None}, "needs an optimizer"),
        ({"optimizer": torch.optim.LBFGS}, "call the model themselves"),
        ({"limit": "plenty"}, "not a size in bytes"),
        ({"allocators": ()}, "no allocator"),
        ({"allocators": ("recorded",)}, "nothing was recorded"),
        ({"allocators": ("malloc",)}, "no allocator 'malloc'"),
        ({"allocators": ("pytorch:wings=2",)}, "no setting wings"),
        ({"flavour": "sweet"}, "flavour"),
        ({"checkpoint": "nowhere"}, "nothing to checkpoint"),
        ({"loss": lambda _: 3}, "the loss is a int"),
        ({"loss": lambda out: out.detach().sum()}, "depends on no parameter"),
        ({"inputs": 3}, "how many samples"),
        ({"model": 3}, "not a torch.nn.Module"),
        ({"model": lambda: 3}, "not a torch.nn.Module"),
        ({"inputs": X.to_sparse()}, "only strided ones"),
        ({"model": nn.Flatten(0)}, "nothing to train"),
    ],
)
def test_senseless_arguments_give_a_single_line(options: dict[str, Any], says: str) -> None:
    options = {"model": nn.Linear(16, 16), "inputs": X} | options
    with pytest.raises(UsageError, match=says) as caught:
        mempool.torch.fit(**options)
    assert "\n" not in str(caught.value)


def test_loss_of_the_output_is_found() -> None:
    class Output(UserDict):
        pass

    def with_loss(make: Callable[[Tensor], Any]) -> list[str]:
        return tried(lambda layer, x: make(layer(x))).warnings

    assert with_loss(lambda out: {"loss": out.mean(), "logits": out}) == []
    assert with_loss(lambda out: out.mean()) == []
    assert with_loss(lambda out: out) == [SUMMED]
    assert with_loss(lambda out: (out, None)) == [SUMMED]


SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(
    SHAPES, st.randoms(use_true_random=False), st.integers(1, 9), st.sampled_from([torch.long, torch.half])
)
def test_inputs_take_another_batch(shape: list[int], random: Any, size: int, dtype: torch.dtype) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)
    back = [order.index(dim) for dim in range(len(shape))]
    tensor = torch.zeros([shape[d] for d in order], dtype=dtype).permute(back)
    whole = {"x": tensor, "rest": [tensor, 3, torch.zeros(()), "word"], "other": torch.zeros(shape[0] + 1, 2)}
    batch = batch_of(whole)
    assert batch == shape[0]
    made = resizable(whole, batch)(size)
    for one in (made["x"], made["rest"][0]):
        assert (list(one.shape), one.dtype) == ([size, *shape[1:]], dtype)
        if size == batch:
            assert one is tensor
        elif all(n > 1 for n in (*shape, size)):
            strides = [sorted(range(len(shape)), key=lambda d: -t.stride(d)) for t in (one, tensor)]
            assert strides[0] == strides[1]
    assert made["rest"][1::2] == [3, "word"]
    assert made["other"].shape == (shape[0] + 1, 2)


def test_inputs_are_given_in_any_usual_form() -> None:
    assert call_arguments(X) == ((X,), {})
    assert call_arguments([X, 1]) == ((X, 1), {})
    assert call_arguments(UserDict(a=X)) == ((), {"a": X})

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.layer(a) + b

    forms: list[Any] = [(X, X.clone()), {"a": X, "b": X.clone()}, lambda size: (X.new_zeros(size, 16),) * 2]
    first, second, third = (mempool.torch.fit(Pair(), form, batch=24) for form in forms)
    assert first.to_dict() == second.to_dict()
    assert third.by_class_bytes["parameters"] == first.by_class_bytes["parameters"]


class Last(nn.Module):
    """A model that hides a recurrent layer whose inputs have the length as first dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][-1]


def held(fit: Fit) -> int:
    return fit.by_class_bytes["inputs"]


def test_doubtful_batch_dimension_gives_a_warning_unless_given() -> None:
    x, says = (
        torch.zeros(10, 4, 16),
        "the first dimension, though GRU takes the length first: give batch_dim=",
    )
    for model in (Last(), Last):
        plain = mempool.torch.fit(model, x, mode="inference")
        assert not any(says in text for text in plain.warnings)  # nothing was resized
        for options in ({"batch": 8}, {"limit": "8GiB"}):
            doubted = mempool.torch.fit(model, x, mode="inference", **options)
            assert any(says in text for text in doubted.warnings)
            assert doubted.largest_batch is None
        said = mempool.torch.fit(model, x, batch=8, batch_dim=1, mode="inference")
        assert held(said) == 10 * 8 * 16 * 4
        assert not any(says in text for text in said.warnings)
    with pytest.raises(UsageError, match="batch_dim is -1"):
        mempool.torch.fit(Last(), x, batch_dim=-1)


class Graph(nn.Linear):
    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return super().forward(x).index_add(0, edges[0], super().forward(x)[edges[1]])


def test_graph_inputs_have_no_largest_batch() -> None:
    edges = torch.zeros(2, 30, dtype=torch.int64)
    fit = mempool.torch.fit(Graph(16, 16), (X, edges), limit="8GiB")
    assert (fit.fits, fit.largest_batch) == (True, None)
    assert any("though an input of (2, 30) does not begin with the batch" in text for text in fit.warnings)

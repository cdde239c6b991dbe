"""Kernels, types and margins of the target device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mempool.torch
from mempool.recording.torch import AccessRecorder
from mempool.torch.estimate.device import kernels
from mempool.torch.estimate.device.emulation import emulate_device
from mempool.torch.estimate.device.kernels import AttentionCall, is_fused
from mempool.torch.estimate.margins import MIB, margins
from traces.trace import EventType, Trace

HOPPER, AMPERE, VOLTA = (9, 0), (8, 0), (7, 0)


class Names(TorchDispatchMode):
    """A mode that records the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def peak_bytes(work: Any) -> int:
    """Return the peak load of a function's buffers."""
    with AccessRecorder() as recorder:
        work()
    return int(recorder.trace().load().max())


def qkv(
    *shape: int, dtype: torch.dtype = torch.float32, kv_heads: int | None = None, grad: bool = True
) -> list[Tensor]:
    """Return a query, a key and a value."""
    batch, heads, length, width = shape
    kinds = (heads, kv_heads or heads, kv_heads or heads)
    return [torch.empty(batch, h, length, width, dtype=dtype, requires_grad=grad) for h in kinds]


@pytest.mark.parametrize(
    ("fused", "capability", "asked"),
    [
        (True, AMPERE, {"dtype": torch.bfloat16}),
        (True, AMPERE, {"dtype": torch.bfloat16, "kv_heads": 2}),
        (True, HOPPER, {"dtype": torch.bfloat16}),
        (True, AMPERE, {"dtype": torch.float32}),
        (True, VOLTA, {"dtype": torch.float16}),
        (False, VOLTA, {"dtype": torch.float16, "kv_heads": 2}),
        (False, AMPERE, {"dtype": torch.float32, "kv_heads": 2}),
        (False, VOLTA, {"dtype": torch.bfloat16}),
        (False, AMPERE, {"dtype": torch.float64}),
    ],
)
def test_the_type_the_heads_and_the_chip_decide_the_kernel(fused: bool, capability: Any, asked: Any) -> None:
    q, k, v = qkv(2, 4, 16, 64, **asked)
    assert is_fused(AttentionCall(q, k, v, enable_gqa="kv_heads" in asked), capability) is fused


def test_a_mask_excludes_grouped_heads_from_fused_attention() -> None:
    mask = torch.empty(16, 16, dtype=torch.bfloat16)
    for kv_heads in (4, 2):
        call = AttentionCall(*qkv(2, 4, 16, 64, dtype=torch.bfloat16, kv_heads=kv_heads), mask)
        assert is_fused(dataclasses.replace(call, enable_gqa=True), HOPPER) is (kv_heads == 4)


def test_the_users_switches_count() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    asked = AttentionCall(*qkv(2, 4, 16, 64, dtype=torch.bfloat16))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert is_fused(asked, AMPERE)
    with sdpa_kernel(SDPBackend.MATH):
        assert not is_fused(asked, HOPPER)


@settings(max_examples=60)
@given(data=st.data())
def test_attention_returns_the_shapes_and_types_of_pytorch(data: st.DataObject) -> None:
    draw = data.draw
    width, length, kv_heads = (
        draw(st.sampled_from([20, 64, 80])),
        draw(st.sampled_from([7, 16])),
        draw(st.sampled_from([2, 4])),
    )
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    kind = draw(st.sampled_from(["none", "causal", "bool", "added", "trained"]))
    capability = draw(st.sampled_from([VOLTA, AMPERE, HOPPER]))
    results = []
    for on in (contextlib.nullcontext(), emulate_device("cuda", capability=capability)):
        with FakeTensorMode(), on:
            q, k, v = qkv(2, 4, length, width, dtype=dtype, kv_heads=kv_heads)
            mask = {"bool": torch.bool, "added": dtype, "trained": dtype}.get(kind)
            bias = None if mask is None else torch.empty(1, 4, length, length, dtype=mask)
            if kind == "trained" and bias is not None:
                bias.requires_grad_()
            out = F.scaled_dot_product_attention(
                q, k, v, bias, draw(st.just(0.0)), kind == "causal", enable_gqa=kv_heads != 4
            )
            out.sum().backward()
            leaves = [t for t in (q, k, v, bias) if t is not None and t.requires_grad]
            results.append(
                [
                    (out.shape, out.dtype),
                    *((t.grad.shape, t.grad.dtype) for t in leaves if t.grad is not None),
                ]
            )
    assert results[0] == results[1]


def test_fused_attention_keeps_no_scores() -> None:
    def peak(length: int) -> int:
        def work() -> None:
            q, k, v = qkv(2, 4, length, 64, dtype=torch.bfloat16)
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

        with FakeTensorMode(), emulate_device("cuda"):
            return peak_bytes(work)

    assert peak(4096) < 2.1 * peak(2048)


def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the fused attention's calls to come."""
    seen: list[str] = []
    apply = kernels._Fused.apply
    monkeypatch.setattr(kernels._Fused, "apply", lambda *args: (seen.append("fused"), apply(*args))[1])
    return seen


def test_attention_inside_of_pytorchs_own_layers_is_fused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fused_calls(monkeypatch)
    with FakeTensorMode(), emulate_device("cuda"):
        layer, x = nn.MultiheadAttention(64, 4, dropout=0.25), torch.empty(8, 2, 64)
        layer(x, x, x, need_weights=False)[0].sum().backward()
    assert seen == ["fused"]


def test_inference_mode_does_not_go_past_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fused_calls(monkeypatch)
    with FakeTensorMode(), emulate_device("cuda"), torch.inference_mode():
        assert not F.scaled_dot_product_attention(*qkv(2, 4, 16, 64)).requires_grad
    assert seen == ["fused"]


@pytest.mark.parametrize("by_hand", [False, True])
def test_recompute_of_a_checkpoint_uses_kernels_of_the_target(
    by_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x).sin() * torch.ones(64, device="cuda")

    seen = fused_calls(monkeypatch)
    with FakeTensorMode(), emulate_device("cuda"):
        x = qkv(2, 4, 16, 64)[0]
        total = checkpoint(work, x, use_reentrant=False).sum()
        torch.autograd.grad(total, x) if by_hand else total.backward()
    assert seen == ["fused", "fused"]


@pytest.mark.parametrize(("device", "fits"), [("cuda", None), ("cpu", True)])
def test_recurrent_layers_on_cuda_leave_the_verdict_open(device: str, fits: bool | None) -> None:
    layer = nn.Sequential(nn.LSTM(8, 16, batch_first=True))
    x, loss = torch.zeros(4, 3, 8), {"loss": lambda output: output[0].sum()}
    found = mempool.torch.fit(layer, x, limit="8GiB", device=device, largest=False, **loss)
    assert found.fits is fits
    labels = [caveat.label for caveat in found.caveats]
    assert labels == ["without cuDNN's recurrent layers"] * (device == "cuda")


def test_optimizers_take_their_foreach_form_and_their_own_again_afterwards() -> None:
    def names() -> list[str]:
        layer = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.empty(2, 4)).sum().backward()
        with Names() as seen:
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()
        return [name for name in seen.seen if "_foreach_" in name]

    with FakeTensorMode():
        assert not names()
        with emulate_device("cuda"):
            assert any("sqrt" in name for name in names())
            assert any("norm" in name for name in names())
        assert not names()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_modules_of_fake_tensors_are_converted_in_place(device: str) -> None:
    with FakeTensorMode(), emulate_device(device):
        layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        layer[0].bias = layer[1].bias
        first, steps = layer[0].weight, layer[1].num_batches_tracked
        layer.to(device).to(torch.bfloat16)
        assert layer[0].weight is first
        assert layer[0].bias is layer[1].bias
        assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
        assert layer[1].num_batches_tracked.dtype == steps.dtype == torch.int64
        layer(torch.empty(2, 4, dtype=torch.bfloat16)).sum().backward()
    assert nn.Linear(2, 2).half().weight.dtype == torch.float16


def test_cuda_autocast_narrows_products_and_widens_norms_and_sums() -> None:
    with FakeTensorMode(), emulate_device("cuda"), torch.autocast("cuda", torch.bfloat16):
        x = torch.empty(2, 4, requires_grad=True)
        y = nn.Linear(4, 4)(x)
        assert y.dtype == torch.bfloat16
        assert (
            nn.LayerNorm(4)(y).dtype
            == y.softmax(-1).dtype
            == y.sum().dtype
            == y.pow(2).dtype
            == torch.float32
        )
        assert F.gelu(y).dtype == torch.bfloat16
        assert F.scaled_dot_product_attention(*[torch.empty(1, 1, 4, 8)] * 3).dtype == torch.bfloat16
    with FakeTensorMode(), emulate_device("cuda"), torch.autocast("cuda"):
        assert nn.Linear(4, 4)(torch.empty(2, 4)).dtype == torch.float16


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_text_is_not_taken_to_be_packed(device: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

    before = masking_utils.find_packed_sequence_indices
    config = LlamaConfig(
        vocab_size=99, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, use_cache=False
    )
    with FakeTensorMode(), emulate_device(device), Names() as seen:
        LlamaForCausalLM(config)(torch.zeros(2, 8, dtype=torch.long))
    assert not any("cumsum" in name for name in seen.seen)
    assert masking_utils.find_packed_sequence_indices is before


def test_the_cpu_and_real_tensors_are_left_alone() -> None:
    with FakeTensorMode(), emulate_device("cpu"), Names() as seen:
        F.scaled_dot_product_attention(*qkv(2, 4, 16, 64))
    assert any("for_cpu" in name for name in seen.seen)
    with emulate_device("cuda"):
        inputs = [torch.randn(1, 2, 8, 16) for _ in range(3)]
        attended = F.scaled_dot_product_attention(*inputs)
    assert torch.equal(attended, F.scaled_dot_product_attention(*inputs))


DEFAULT = (2 * 4096 + 8 * 16) << 10


def traced(make: Callable[..., nn.Module], *sizes: Any, backward: bool = True) -> Trace:
    """Record the forward pass of a layer, and optionally its backward pass; the last size is the input's."""
    with FakeTensorMode():
        layer = make(*sizes[:-1])
        with AccessRecorder([layer]) as recorder:
            out = layer(torch.empty(sizes[-1]))
            if backward:
                out.sum().backward()
            del out
        return recorder.trace()


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG",):
        monkeypatch.delenv(name, raising=False)


def test_the_cpu_adds_nothing() -> None:
    assert margins(traced(nn.Linear, 4, 4, (2, 4)), "cpu") == {}


def test_autograd_thread_has_a_separate_workspace() -> None:
    once = margins(traced(nn.Linear, 4, 4, (2, 4), backward=False))
    twice = margins(traced(nn.Linear, 4, 4, (2, 4)))
    assert once["cublas_workspace"] == DEFAULT
    assert twice["cublas_workspace"] == 2 * DEFAULT


def test_models_without_products_have_no_workspace() -> None:
    assert "cublas_workspace" not in margins(traced(nn.ReLU, (2, 4), backward=False))


def test_hopper_has_more(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced(nn.Linear, 4, 4, (2, 4), backward=False)
    assert margins(trace, capability=(9, 0))["cublas_workspace"] == 32 * MIB
    assert margins(trace, capability=(9, 0))["cuda_context"] > margins(trace)["cuda_context"]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert margins(trace, capability=(9, 0))["cublas_workspace"] == 32 * MIB
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert margins(trace, capability=(9, 0))["cublas_workspace"] == 128 << 10
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "nonsense")
    assert margins(trace)["cublas_workspace"] == DEFAULT


def test_convolution_at_the_peak_needs_its_buffers_twice() -> None:
    trace = traced(nn.Conv2d, 3, 8, 3, (4, 3, 16, 16), backward=False)
    sizes = trace.size[trace.kind == EventType.ALLOC]
    assert margins(trace)["cudnn_workspace"] == sizes.sum()  # weight, bias, input and output


def test_a_convolution_far_from_the_peak_needs_none() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x).mean() + torch.empty(1 << 24)

    assert "cudnn_workspace" not in margins(traced(Late, (4, 3, 16, 16), backward=False))

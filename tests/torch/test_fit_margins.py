"""Margins: memory that a GPU needs beyond the operations of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mempool.errors import UsageError
from mempool.recording.torch import AccessRecorder
from mempool.torch.estimate.margins import MIB, margins
from traces.trace import EventType, Trace

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT = (2 * 4096 + 8 * 16) << 10


def traced(make: Callable[..., nn.Module], *sizes: Any, backward: bool = True) -> Trace:
    """A forward of a layer, and its backward if so said; of the sizes the last is the input's."""
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
    for name in (
        "CUBLAS_WORKSPACE_CONFIG",
        "CUBLASLT_WORKSPACE_SIZE",
        "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
        "NCCL_BUFFSIZE",
    ):
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
    monkeypatch.setenv("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "0")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "nonsense")
    assert margins(trace)["cublaslt_workspace"] == 4 * MIB


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


def test_margins_of_the_user_replace_estimates() -> None:
    trace = traced(nn.Linear, 4, 4, (2, 4))
    mine = margins(trace, margin={"cuda_context": 0, "nccl": 7})
    assert mine["cuda_context"] == 0
    assert mine["nccl"] == 7
    assert margins(trace, "cpu", margin={"kernels": 3}) == {"kernels": 3}
    with pytest.raises(UsageError, match="no margin 'contxt'; there are cuda_context"):
        margins(trace, margin={"contxt": 1})
    with pytest.raises(UsageError, match="below zero"):
        margins(trace, margin={"nccl": -1})


def test_many_processes_have_buffers_and_buckets() -> None:
    names = ("step", "gradients")
    kinds = [EventType.ALLOC, EventType.FREE, EventType.MARK, EventType.ALLOC]
    trace = Trace.of(
        kinds,
        [0, 0, -1, 1],
        [512, 0, 0, 1024],
        names=names,
        operation=[-1, -1, 0, -1],
        category=[1, -1, -1, 1],
    )
    alone, many = margins(trace), margins(trace, processes=2)
    assert many["ddp_buckets"] == 1024
    assert many.keys() - alone.keys() == {"nccl", "ddp_buckets"}

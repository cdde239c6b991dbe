"""Traces and exports within a limit have the same outcome as without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from functorch.compile import aot_module, nop
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from mempool.torch.eager.mode import OffloadMode
from mempool.torch.offload.host_engine import HostEngine

CPU = torch.device("cpu")


def updated(x: Any) -> Any:
    """Write to views in place; functionalization replaces such writes."""
    y = x.clone()
    y[:1].mul_(2)
    y.view(-1)[3:5].zero_()
    z = (y @ y).relu()
    return z.add_(x[:1]) * z


def exported(model: Any, x: Any) -> Any:
    return torch.export.export(model, (x,)).run_decompositions().graph_module.code


class Sized(torch.nn.Module):
    """Make a tensor of a size that an export leaves open."""

    def forward(self, x: Any) -> Any:
        return torch.zeros(2 * x.shape[0]), x + 1


def exported_with_symbols(model: Any, x: Any) -> Any:
    del model
    shapes = {"x": {0: torch.export.Dim("rows")}}
    return torch.export.export(Sized(), (x,), dynamic_shapes=shapes).graph_module.code


def made(model: Any, x: Any) -> Any:
    return make_fx(torch.func.functionalize(lambda one: updated(model(one))))(x).code


def traced_fake(model: Any, x: Any) -> Any:
    return make_fx(model, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x).code


def trained(model: Any, x: Any) -> Any:
    aot_module(model, fw_compiler=nop, bw_compiler=nop)(x).square().mean().backward()
    return model[0].weight.grad.tolist()


def functionalized(model: Any, x: Any) -> Any:
    """Functionalize on real tensors, whose operations PyTorch's mode hides from the offloading mode."""
    del model
    others = [x + i for i in range(4)]
    return [dispatch_functionalize(updated)(other).tolist() for other in (*others, *others)]


class SparseGradient(torch.autograd.Function):
    """Identity with a sparse gradient of two rows."""

    addresses: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.shape = x.shape
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        rows, values = torch.tensor([[0, 2]]), torch.ones(2, ctx.shape[1])
        SparseGradient.addresses.append(values.data_ptr())
        return torch.sparse_coo_tensor(rows, values, ctx.shape, check_invariants=False)


def taken_gradient(model: Any, x: Any) -> Any:
    """Tell whether autograd takes a sparse gradient without a copy."""
    del model
    x = x.requires_grad_()
    SparseGradient.apply(x).sum().backward()
    return SparseGradient.addresses.pop() == x.grad._values().data_ptr()


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of PyTorch's export
@pytest.mark.parametrize(
    "trace",
    [exported, exported_with_symbols, made, traced_fake, trained, functionalized, taken_gradient],
)
def test_trace_within_a_limit_equals_the_trace_without(trace: Callable[[Any, Any], Any]) -> None:
    def outcome(mode: Any) -> Any:
        torch.manual_seed(0)
        with mode:
            model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
            return trace(model, torch.randn(32, 32))

    engine = HostEngine(1 << 30)
    try:
        assert outcome(OffloadMode(engine, CPU, 1024)) == outcome(contextlib.nullcontext())
    finally:
        engine.close()

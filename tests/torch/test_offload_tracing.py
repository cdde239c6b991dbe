"""Traces and exports within a limit: each has the outcome without one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from functorch.compile import aot_module, nop
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from mempool.torch.eager.mode import OffloadMode
from mempool.torch.offload.host_engine import HostEngine

CPU = torch.device("cpu")


def updated(x: Any) -> Any:
    """Write views in place, which functionalization replaces."""
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
    """Run on real tensors, whose operations PyTorch's mode runs unseen."""
    del model
    others = [x + i for i in range(4)]
    return [dispatch_functionalize(updated)(other).tolist() for other in (*others, *others)]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of PyTorch's export
@pytest.mark.parametrize(
    "trace", [exported, exported_with_symbols, made, traced_fake, trained, functionalized]
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

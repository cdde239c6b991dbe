"""Captured graphs and their edits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from compiled_programs import compiled
from joint_trace import trace_joint
from torch import nn
from torch.nn import functional as F

from mempool.errors import UsageError
from mempool.hardware.gpu_throughput import rates_of
from mempool.hardware.roofline import Roofline
from mempool.torch.compiled.costs import MeasuredCosts
from mempool.torch.compiled.graph import CapturedGraph, capture
from mempool.torch.compiled.joint_graph import MergedGraph

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import itertools

from compiled_programs import ALL, PLAIN, partitioned, same, trained

from mempool.torch.compiled import ops
from mempool.torch.compiled.graph_passes import apply
from mempool.torch.compiled.runtime import RUNTIME
from solvers.rewriting import Graph, Offload, Reload, Rewriting


class Step(nn.Module):
    """A model with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Any, y: Any) -> Any:
        return F.cross_entropy(self.model(x), y)


def captured(model: Any, *inputs: Any, loss: Any = torch.sum, **options: Any) -> CapturedGraph:
    joint = trace_joint(model, inputs, loss)
    return capture(joint.module, joint.forward_outputs, **options)


def peak_bytes(graph: Graph) -> int:
    """Return the peak by the definition of `Graph`, slowly."""
    n = len(graph)
    alive = np.zeros(n, np.int64)
    for base in range(len(graph.size)):
        family = np.flatnonzero(graph.base == base)
        readers = [i for value in family for i in graph.readers_of(value)]
        last = n - 1 if graph.lasting[family].any() else max([graph.producer[base], *readers])
        alive[max(graph.producer[base], 0) : last + 1] += graph.size[base]
    return int(alive.max())


def named(graph: Graph, kind: str) -> list[int]:
    return [i for i in range(len(graph)) if graph.kinds[graph.kind[i]] == f"aten.{kind}"]


def small_network() -> nn.Module:
    layers = [(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)]
    body = [layer for block in layers for layer in block]
    return nn.Sequential(nn.Conv2d(3, 8, 3), *body, nn.MaxPool2d(4), nn.Flatten(), nn.Linear(392, 10))


def resnet18() -> nn.Module:
    from networks import resnet

    return resnet(18)


@pytest.mark.parametrize("make", [small_network, pytest.param(resnet18, marks=pytest.mark.full)])
def test_captured_peak_equals_the_recorded_peak(make: Callable[[], nn.Module]) -> None:
    from modelled import training_trace

    from solvers.swap import step_of

    joint = trace_joint(
        lambda: Step(make()), lambda: (torch.empty(64, 3, 32, 32), torch.empty(64, dtype=torch.long))
    )
    momenta = joint.parameter_bytes
    graph = capture(joint.module, joint.forward_outputs, outside_bytes=momenta).graph
    recorded = step_of(training_trace(make, (64, 3, 32, 32), Roofline(rates_of()))).peak_bytes
    assert peak_bytes(graph) == pytest.approx(recorded, rel=2e-3)


def test_views_share_memory_and_unused_results_count() -> None:
    class Branches(nn.Module):
        def forward(self, x: Any) -> Any:
            y = x.exp()
            return y.view(-1)[:8].sin() + y.max(1)[0].view(-1)

    graph = captured(Branches(), torch.randn(8, 4, requires_grad=True)).graph
    view, largest = named(graph, "view")[0], named(graph, "max")[0]
    made = np.flatnonzero(graph.producer == view)
    assert graph.size[made].tolist() == [0]
    assert graph.producer[graph.base[made]].tolist() == named(graph, "exp")
    assert graph.size[graph.producer == largest].tolist() == [8 * 4, 8 * 8]


def test_operations_carry_pass_and_module() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    graph = captured(model, torch.randn(4, 8)).graph
    assert (np.diff(graph.backward.astype(int)) >= 0).all()
    assert 0 < graph.backward.sum() < len(graph)
    where = {
        graph.names[i]: graph.modules[graph.module[i]] for i in range(len(graph)) if graph.module[i] >= 0
    }
    assert where["addmm"] == "0"
    assert where["tanh"] == where["tanh_backward"] == "1"


def test_parameters_inputs_and_outputs_never_move() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            y = self.inner(x).exp()
            return y.sin(), y

    found = captured(Both(), torch.randn(4, 8), loss=lambda both: (both[0].sum(), both[1].view(-1)))
    graph = found.graph
    inputs = [value for value in found.inputs if "primals" in str(found.values[value])]
    returned = [value for value in found.outputs if value >= 0]
    assert graph.lasting[inputs + returned].all()
    assert not graph.movable[inputs + returned].any()
    y = np.flatnonzero(graph.producer == named(graph, "exp")[0])
    assert graph.lasting[y].all()  # a view of it is returned
    assert not graph.movable[y].any()
    tangents = [value for value in found.inputs if "tangents" in str(found.values[value])]
    assert tangents
    assert not graph.lasting[tangents].any()


def test_random_operations_keep_their_order() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))
    graph = captured(model, torch.randn(4, 8)).graph
    drawn = [i for i in range(len(graph)) if not graph.repeatable[i]]
    assert len(drawn) == 2
    assert graph.control.tolist() == [drawn]


def test_in_place_writes_keep_their_order() -> None:
    def step(y: Any) -> Any:
        x, z = y.tan(), y.sin()
        torch.ops.aten.copy_.default(x, z)
        return (x.cos(),)

    from torch.fx.experimental.proxy_tensor import make_fx

    module = make_fx(step, tracing_mode="fake")(torch.randn(4))
    graph = capture(module, 1).graph
    copy, cosine = named(graph, "copy_")[0], named(graph, "cos")[0]
    assert [copy, cosine] in graph.control.tolist()
    assert not graph.repeatable[[copy, cosine]].any()
    assert graph.repeatable[named(graph, "sin")].all()
    movable = {kind: graph.movable[graph.producer == named(graph, kind)[0]].all() for kind in ("tan", "sin")}
    assert movable == {"tan": False, "sin": True}


def test_symbolic_sizes_use_traced_values_without_guards() -> None:
    from torch._functorch.aot_autograd import aot_function
    from torch._guards import detect_fake_mode

    found = []

    def keep(module: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        sizes = detect_fake_mode([node.meta.get("val") for node in module.graph.nodes]).shape_env
        before = len(sizes.guards)
        graph = capture(module, num_fwd_outputs).graph
        found.append((graph, len(sizes.guards) - before))
        from torch._functorch.partitioners import default_partition

        return default_partition(module, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    function = aot_function(
        lambda x: (x.sin() @ x).exp().sum(), lambda module, _: module, partition_fn=keep, dynamic=True
    )
    function(torch.randn(6, 6, requires_grad=True))
    graph, guards = found[0]
    assert guards == 0
    numbers = graph.rank == -1
    assert numbers.any()
    assert not graph.movable[numbers].any()
    assert not graph.size[numbers].any()
    assert graph.size[graph.producer == named(graph, "exp")[0]].tolist() == [6 * 6 * 4]


def test_step_without_gradients_is_refused() -> None:
    with pytest.raises(UsageError, match="needs a gradient"):
        trace_joint(nn.ReLU(), (torch.randn(3),), torch.sum)


def test_recompilation_reuses_measured_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second measurement would need additional memory."""

    def compile_once() -> None:
        options = {"inner": "eager", "limit": 1 << 30, "link": "pcie3"}
        compiled(lambda x: (x.sin() @ x).cos().sum(), options)(torch.randn(48, 48, requires_grad=True))

    compile_once()
    monkeypatch.setattr(MeasuredCosts, "_measure", lambda *_: pytest.fail("measured again"))
    compile_once()


def dense() -> nn.Module:
    norm = [nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*norm, nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))


def offloaded(release_early: bool) -> tuple[MergedGraph, CapturedGraph, list[Offload]]:
    """Offload each value that the backward pass of `dense` reads; all reloads begin with that pass."""
    torch.manual_seed(0)
    joint = trace_joint(dense(), (torch.randn(256, 32),), lambda y: y.square().mean())
    merged, found = partitioned(joint)
    graph, offloads = found.graph, []
    turn = int(np.argmax(graph.backward))
    for value in np.flatnonzero(graph.base == np.arange(len(graph.base))).tolist():
        readers = graph.readers_of(value)
        late = readers[readers >= turn].tolist()
        last = int(readers[readers < turn].max(initial=graph.producer[value]))
        if 0 <= graph.producer[value] < turn and late and (graph.base == value).sum() == 1:
            release = last + 1 if release_early else turn - 1
            offloads.append(Offload(value, (Reload(tuple(late), turn),), release=release))
    assert len(offloads) >= 3
    apply(merged, found, Rewriting(tuple(offloads)))
    return merged, found, offloads


def test_reloads_begin_at_their_trigger_in_the_order_of_their_readers() -> None:
    merged, _, offloads = offloaded(release_early=False)
    nodes = list(merged.halves.backward.graph.nodes)
    begun = [node for node in nodes if node.target is ops.reload]
    waits = [node for node in nodes if node.target is ops.reload_wait]
    assert [wait.args[0] for wait in waits] == begun
    assert len(begun) == len(offloads)
    assert nodes.index(begun[-1]) < nodes.index(waits[0])
    assert all(wait.next in wait.users or wait.next.target is ops.reload_wait for wait in waits)


def test_offloads_end_before_the_operation_that_needs_their_memory() -> None:
    merged, found, offloads = offloaded(release_early=True)
    nodes = list(merged.halves.forward.graph.nodes)
    ends = {wait.args[1]: nodes.index(wait) for wait in nodes if wait.target is ops.offload_wait}
    checked = 0
    for offload in offloads:
        value = next(node for node, number in found.value_of.items() if number == offload.value)
        following = merged.source[found.operations[offload.release]]
        if following in nodes:
            assert ends[merged.source[value]] < nodes.index(following)
            checked += 1
    assert checked >= 3


CALLS = itertools.count()


@torch.library.custom_op("mempool_tests::mask", mutates_args=())
def mask(x: torch.Tensor) -> torch.Tensor:
    """Draw random numbers without declaring so, and count the calls."""
    next(CALLS)
    return (torch.rand(x.shape) > 0.5).to(x.dtype) * 2


@mask.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (layer(x) * mask(x.detach())).tanh()
        return x


@pytest.mark.parametrize("stride", [(256, 1, 32, 4), (256, 64, 8, 1)], ids=["last", "as asked"])
def test_reloads_have_the_requested_strides(
    stride: tuple[int, ...],
) -> None:
    left = torch.empty_strided((4, 4, 8, 8), stride).uniform_()
    ticket = RUNTIME.offload(left, 0)
    handle = RUNTIME.offload_wait(ticket)
    back = RUNTIME.reload_wait(RUNTIME.reload(handle, torch.zeros(4, 4, 8, 8)))
    at_once = RUNTIME.reload_sync(RUNTIME.offload_sync(left, 0), torch.zeros(4, 4, 8, 8))
    for one in (back, at_once):
        assert one.is_contiguous()
        assert torch.equal(one, left)


@pytest.mark.parametrize("limit", [1 << 30, 92_000])
def test_foreign_operators_run_once_per_step(limit: int) -> None:
    """A foreign operator is neither recomputed nor run for a measurement."""
    plain = trained(Masked, PLAIN, width=32)
    before = next(CALLS)
    got = trained(Masked, PLAIN | {"limit": limit, "link": "1,1e-3"}, width=32)
    assert next(CALLS) - before - 1 == 3 * 4
    assert same(got, plain)


@pytest.mark.usefixtures("everything_leaves")
def test_results_of_foreign_operators_may_be_offloaded() -> None:
    plain = trained(Masked, PLAIN, width=32)
    assert same(trained(Masked, ALL, width=32), plain)
    assert RUNTIME.counters.reloads > 0

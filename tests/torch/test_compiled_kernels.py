"""Fused graphs: limit search, kernel orders, and memory of kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from compiled_programs import ALL, compiled, force, named_limit, partitioned, same
from joint_trace import trace_joint
from models import MODELS
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor
from torch._inductor import graph as lowering

import mempool.torch
from mempool.torch.compiled import ops
from mempool.torch.compiled.decide import StepDecider, measure_step
from mempool.torch.compiled.graph_passes import apply
from mempool.torch.compiled.inductor.kernels import by_operation_order, delay_reloads, reloads
from mempool.torch.compiled.inductor.limit_search import Request, Trial, search_limit
from mempool.torch.compiled.inductor.patches import donated_inputs, dying_inputs
from mempool.torch.compiled.joint_graph import GraphPair, join
from mempool.torch.compiled.options import parse_options
from mempool.torch.compiled.records import Constraints, Extreme
from mempool.torch.compiled.runtime import RUNTIME
from mempool.torch.compiled.shared_limit import SHARED_LIMITS
from solvers.rewriting import Graph, Offload, Reload, Rewriting

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),  # of PyTorch's own modules
]


@st.composite
def compilers(draw: st.DrawFn) -> tuple[int, int, Callable[..., Trial[int]], list[tuple[Request, bool]]]:
    """Draw a limit, the least feasible request, and a compiler with arbitrary needs."""
    least, limit = draw(st.integers(1, 1000)), draw(st.integers(1, 2000))
    seed = draw(st.integers(0, 1 << 30))
    asked: list[tuple[Request, bool]] = []

    def look(bytes_: Request, *, small: bool) -> Trial[int]:
        assert isinstance(bytes_, Extreme) or bytes_ >= least
        asked.append((bytes_, small))
        extremes = {Extreme.NOTHING: 2000, Extreme.LEAST: least, Extreme.ALL: least + 1}
        size = extremes[bytes_] if isinstance(bytes_, Extreme) else bytes_
        random = np.random.default_rng([seed, size, small])
        return Trial(int(size * random.uniform(0.6, 1.4)), size, random.uniform(0, 0.1), size)

    return limit, least, look, asked


@given(compilers())
def test_limit_search_returns_a_tried_decision_within_the_limit(given: tuple[Any, ...]) -> None:
    """If even the extremes exceed the limit, the extreme with the lowest peak is returned."""
    limit, least, look, asked = given
    found, holds = search_limit(limit, least, look)
    assert len(asked) <= 12
    observer = [look(bytes_, small=small) for bytes_, small in asked[:]]
    assert found in observer
    assert holds == (found.peak_bytes <= limit)
    if not holds:
        assert search_limit(found.peak_bytes, least, look)[1]
        extremes = [look(one, small=small).peak_bytes for one in Extreme for small in (False, True)]
        assert found.peak_bytes == min(extremes)


@given(st.integers(100, 1000), st.floats(0.8, 1.0), st.integers(1, 90))
def test_limit_search_uses_nearly_the_whole_limit(limit: int, share: float, least: int) -> None:
    """The search asks for more bytes while the step loses time."""

    def look(asked: int, *, small: bool) -> Trial[int]:
        assert not small
        return Trial(int(share * asked), asked, 1.0, asked)

    found, holds = search_limit(limit, least, look)
    assert holds
    assert found.peak_bytes >= 0.95 * limit


@dataclass(eq=False)
class Buffer:
    size: int
    readers: list[Kernel] = field(default_factory=list)

    @property
    def mpi_buffer(self) -> Any:
        return type("Info", (), {"succ_nodes": self.readers, "size_alloc": self.size})


@dataclass(eq=False)
class Kernel:
    """Stand-in for inductor's scheduler node, as far as orders go."""

    max_order: int
    op_overload: Any = None
    made: Buffer = field(default_factory=lambda: Buffer(0))
    before: list[Kernel] = field(default_factory=list)
    for_copies: bool = False

    @property
    def node(self) -> Kernel:
        return self

    @property
    def mpi_node(self) -> Any:
        return type("Info", (), {"pred_nodes": self.before, "succ_nodes": self.made.readers})

    def get_outputs(self) -> list[Buffer]:
        return [self.made]

    def reads(self, other: Kernel) -> None:
        self.before.append(other)
        other.made.readers.append(self)


@st.composite
def programs(draw: st.DrawFn) -> list[Kernel]:
    """Draw kernels in a valid order, with reloads."""
    kernels: list[Kernel] = []

    def one(*read: Kernel, operation: Any = None, size: int = 0) -> Kernel:
        kernels.append(made := Kernel(draw(st.integers(0, 30)), operation, Buffer(size)))
        for other in dict.fromkeys(read):
            made.reads(other)
        return made

    for _ in range(draw(st.integers(1, 6))):
        others = [kernel for kernel in kernels if not kernel.for_copies]
        some = draw(st.lists(st.sampled_from(others), max_size=2)) if others else []
        one(*some)
        if draw(st.booleans()):
            begun = one(operation=ops.reload, size=8)
            ticket = one(begun)
            begun.for_copies = ticket.for_copies = True
            for _ in range(draw(st.integers(0, 3))):
                one()
            one(ticket, operation=ops.reload_wait, size=draw(st.integers(1, 9)))
    return kernels


def loads_of(order: list[Kernel], own: dict[Kernel, int]) -> np.ndarray:
    """Return the bytes of each kernel and of the reloads in flight."""
    place = {kernel: i for i, kernel in enumerate(order)}
    loads = np.array([own[kernel] for kernel in order])
    for one in reloads(order):
        loads[place[one.kernels[0]] : place[one.awaited]] += one.size
    return loads


def can_run(order: list[Kernel]) -> bool:
    place = {kernel: i for i, kernel in enumerate(order)}
    return all(place[other] < place[kernel] for kernel in order for other in kernel.before)


@given(programs())
def test_kernels_are_ordered_by_their_last_operation(kernels: list[Kernel]) -> None:
    order = by_operation_order(kernels)
    assert set(order) == set(kernels)
    assert len(order) == len(kernels)
    assert can_run(order)
    for i, kernel in enumerate(order):  # whatever could have come sooner stands later in the program
        ready = [one for one in order[i:] if set(one.before) <= set(order[:i])]
        assert kernel.max_order == min(one.max_order for one in ready)


@given(programs(), st.data())
def test_reloads_are_delayed_only_above_the_limit(kernels: list[Kernel], data: st.DataObject) -> None:
    """All bytes of movable reloads are given back, and other kernels keep their order."""
    own = {kernel: data.draw(st.integers(0, 20)) for kernel in kernels}
    limit = data.draw(st.integers(0, 30))
    loads = loads_of(kernels, own)
    order = delay_reloads(kernels, loads, limit)
    assert set(order) == set(kernels)
    assert len(order) == len(kernels)
    assert can_run(order)
    moving = {kernel for one in reloads(kernels) for kernel in one.kernels}
    assert [k for k in order if k not in moving] == [k for k in kernels if k not in moving]
    if loads.max() <= limit:
        assert order == kernels
    after = dict(zip(order, loads_of(order, own), strict=True))
    for kernel, load in after.items():
        assert kernel in moving or load <= limit or load == own[kernel]


class Many(nn.Module):
    """A sum over many parts and a concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.first(x)
        parts = [(shared * layer(x).sigmoid()).exp() for layer in self.layers]
        return torch.cat(parts, 1).tanh()


class Pieces(nn.Module):
    """Concatenations only, so that kernel groups end before nodes that are no kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for _ in range(3):
                x = torch.cat([x.flip(0).sin(), x.flip(1).cos()], 1)
            x = x.flip(0).sum(0)
        return self.weight * x


class Inside(nn.Module):
    """Values that inductor computes again for each reader unless they lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        y = torch.cat([x.sin(), x.flip(0).cos()], 1)
        z = y.t().contiguous().flip(0).cumsum(0)
        u = torch.cat([z.sin(), z.flip(1).cos()], 1)
        return u.t().cumsum(0).cumsum(1)


class Gelu(nn.Module):
    """Blocks whose kernels read an offloaded value for several operations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize(
    ("make", "shape", "share"),
    [
        pytest.param(Many, (512, 32), 0.75, marks=pytest.mark.full),
        pytest.param(Pieces, (512, 64), 0.87, marks=pytest.mark.full),
        pytest.param(Pieces, (512, 64), 0.94, marks=pytest.mark.full),
        pytest.param(Inside, (512, 64), 0.86, marks=pytest.mark.full),
        pytest.param(Inside, (512, 64), 0.94, marks=pytest.mark.full),
        pytest.param(Gelu, (1024, 32), 0.1, marks=pytest.mark.full),
    ],
)
def test_predicted_kernel_peaks_equal_measured_peaks(
    make: Callable[[], nn.Module], shape: tuple[int, ...], share: float
) -> None:
    """Equal to the byte, with in-place results and overwritten saved values."""
    options = {"inner": "inductor", "link": "pcie3"}

    def peak(limit: int) -> tuple[int, int]:
        """Return the measured peak of a second step and the predicted peak."""
        torch.manual_seed(0)
        with mempool.torch.install(device="cpu", mode="record") as pool:
            before = pool.client.stats()["requested"]["current"]
            model = make()
            run = compiled(lambda x: model(x).square().mean(), {**options, "limit": limit})
            for _ in range(2):
                x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
                model.zero_grad()
                pool.client.reset_peaks()
                run(x).backward()
            measured = pool.client.stats()["requested"]["peak"] - before
        (part,) = SHARED_LIMITS[-1].graphs.values()
        return measured, part.decision.peak_bytes

    plain, most = peak(1 << 40)
    assert plain == most
    limit = int(share * plain)
    try:
        measured, predicted = peak(limit)
    except BackendCompilerFailed as refused:
        (limit,) = map(int, re.findall(r"no step fits .* needs (\d+)", str(refused)))
        assert limit <= plain
        measured, predicted = peak(limit)
    assert measured == predicted <= limit


@pytest.mark.usefixtures("everything_leaves")
def test_offloaded_values_are_computed_once() -> None:
    """Without realization, inductor would compute the value for the copy and again for other readers."""
    x, weight = torch.randn(4096, 64), torch.randn(64, 1, requires_grad=True)
    with mempool.torch.install(device="cpu", mode="record") as pool:
        run = compiled(lambda x: (x.sin() @ weight).sum(), ALL | {"inner": "inductor"})
        for _ in range(2):
            before = pool.client.stats()["requested"]["current"]
            pool.client.reset_peaks()
            run(x)
        assert RUNTIME.counters.offloads
        assert x.nbytes <= pool.client.stats()["requested"]["peak"] - before < 2 * x.nbytes


@pytest.mark.parametrize("which", [0, 1])
def test_sums_of_products_round_independent_of_readers(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor fuses a product into the sum only if the product has no other reader, such as an offload."""
    x, weights = torch.randn(64, 512), [torch.randn(512, 64, requires_grad=True) for _ in range(2)]

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x @ weights[0] + (2 * x) @ weights[1]).sin()

    def away(graph: Graph) -> Rewriting:
        products = [op for op, name in enumerate(graph.names) if name in ("mm", "mm_1")]
        (total,) = (op for op, name in enumerate(graph.names) if name == "add")
        value = int(np.flatnonzero(graph.producer == products[which])[0])
        return Rewriting((Offload(value, (Reload((total,)),)),))

    expected = compiled(function, {"inner": "inductor"})(x)
    force(monkeypatch, away)
    assert same([compiled(function, ALL | {"inner": "inductor"})(x).detach()], [expected.detach()])
    assert RUNTIME.counters.offloads == 1


class Viewed(nn.Module):
    """Saves a product with a view, a result, an input, and one unshared value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        own = y.sin() + y.view(-1, 8, 64).cos().view(-1, 64)
        return own.sin().exp()


def test_only_unshared_saved_values_are_donated() -> None:
    joint = trace_joint(Viewed(), (torch.randn(64, 64),), lambda y: y)
    merged, _ = partitioned(joint)
    saved = set(merged.halves.saved_placeholders)
    assert saved >= {"mm", "view", "add"}
    options = parse_options({"limit": 1 << 30, "link": "pcie3"})
    step = measure_step(merged, options)
    freed_inputs = step.captured.arguments_at(range(2))
    assert len(freed_inputs) == 2
    for constraints in (
        Constraints(),
        Constraints(keep_least=True, freed_inputs=freed_inputs),
    ):  # what goes is somebody else's all the same
        made = StepDecider(step, options, constraints).decide()
        inputs = merged.halves.backward.graph.find_nodes(op="placeholder")
        assert [inputs[place].name for place in donated_inputs(merged, made)] == ["add"]


class Halved(nn.Module):
    """Both halves of a product may be saved under names that the backward graph also uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = x @ self.weights[0]
        first, second = whole.split(32)
        ordered, _ = (x[:32] @ self.weights[1]).sort(-1)
        ends = [(first * second) @ self.weights[2], (ordered * 2) @ self.weights[3], whole.sin()]
        return torch.stack([end.square().mean() for end in ends]).sum()


def test_renamed_saved_values_are_not_donated() -> None:
    joint = trace_joint(Halved(), (torch.randn(64, 64),), lambda y: y)
    inputs = [node.meta["val"] for node in joint.module.graph.find_nodes(op="placeholder")]
    parts = min_cut_rematerialization_partition(
        joint.module, inputs, num_fwd_outputs=joint.forward_outputs, compiler="inductor"
    )
    merged = join(GraphPair(*parts, joint.forward_outputs), stale=True)
    options = parse_options({"limit": 1 << 30, "link": "pcie3"})
    step = measure_step(merged, options)
    graph = step.captured.graph
    again = [value for value, op in enumerate(graph.producer) if graph.names[op] in ("mul", "mul_1")]
    made = StepDecider(step, options).simulate_decision(Rewriting((), tuple(again)))
    apply(merged, made.captured, made.rewriting)
    inputs = [node.name for node in merged.halves.backward.graph.find_nodes(op="placeholder")]
    saved = [node.name for node in merged.halves.saved]
    assert {"getitem", "getitem_1", "mm"} <= set(saved)
    assert not {"getitem", "getitem_1"} <= set(inputs)  # so that other names were found for them
    names = {inputs[place] for place in donated_inputs(merged, made)}
    assert "mm" in inputs
    assert "mm" not in names  # they have its memory
    halves = {merged.halves.saved_placeholders[name].name for name in ("getitem", "getitem_1")}
    assert not halves & names
    memories = {dying_inputs(merged, made)[name] for name in (*halves, "mm")}
    assert len(memories) == 1  # which counts once
    assert "mm_2" in names


def test_arguments_are_never_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if PyTorch donates every input of the backward graph."""
    monkeypatch.setattr(lowering, "get_donated_idxs", lambda: list(range(16)))
    x, gradient = torch.randn(4096, requires_grad=True), torch.randn(4096)
    before = [x.detach().clone(), gradient.clone()]
    compiled(torch.sin, {"inner": "inductor", "limit": 1 << 30, "link": "pcie3"})(x).backward(gradient)
    assert same([x.detach(), gradient], before)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.* bytes are on the device")  # by the tests before
@pytest.mark.usefixtures("one_thread")  # several add up an embedding's gradient in any order
def test_saved_values_with_views_are_not_overwritten() -> None:
    """A value and a view of the value may both be saved for a recomputation."""
    model = MODELS["gpt"]()
    batch = model.batch(0, 2)

    def gradients(options: dict[str, Any]) -> list[torch.Tensor]:
        model.zero_grad()
        with inductor.patch({"cpp.simdlen": 1}):
            compiled(model.loss, {"inner": "inductor", "link": "pcie3", **options})(*batch).backward()
        return [one.grad for one in model.parameters() if one.grad is not None]

    expected = gradients({})
    assert same(gradients({"limit": 1 << 40}), expected)
    (part,) = SHARED_LIMITS[-1].graphs.values()
    plain, limit = part.decision.plain.peak_bytes, 1000
    for _ in range(3):
        try:
            got = gradients({"limit": limit})
            break
        except BackendCompilerFailed as refused:
            limit = named_limit(refused)
    assert same(got, expected)
    for share in (0.1, 0.25, 0.4):
        assert same(gradients({"limit": int(limit + share * (plain - limit))}), expected)


def test_branches_warn_of_uncounted_memory() -> None:
    def chosen(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin() @ y, lambda y: y.cos() * 1.0, (x,)).sum()

    with pytest.warns(UserWarning, match="memory needed inside cond is unknown"):
        compiled(chosen, {"inner": "eager", "limit": 1 << 30, "link": "pcie3"})(
            torch.ones(8, 8).requires_grad_()
        )


@pytest.mark.parametrize("least", [False, True])
def test_extreme_decisions_ignore_measurements(least: bool) -> None:
    """The least limit named by a refusal is feasible again with other measurements."""
    layers = [nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.LayerNorm(96)) for _ in range(3)]
    joint = trace_joint(nn.Sequential(*layers), (torch.randn(256, 96),), lambda y: y.square().mean())
    merged, _ = partitioned(joint)
    options = parse_options({"limit": 1000, "link": "pcie3"})
    step = measure_step(merged, options)
    found = []
    for seed in range(2):
        seconds = np.random.default_rng(seed).uniform(1e-6, 1e-3, len(step.captured.graph))
        captured = replace(step.captured, graph=step.captured.graph.with_columns(seconds=seconds))
        found.append(StepDecider(replace(step, captured=captured), options, Constraints(keep_least=least)))
    for extreme in Extreme:
        one, other = (decider.decide_extreme(extreme).rewriting for decider in found)
        assert one == other
    one, other = (decider.decide_within(decider.least_limit()).rewriting for decider in found)
    assert one != other

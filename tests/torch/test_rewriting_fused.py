"""Limits with operations that are fused: what is asked for, when copies begin, what kernels need."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from halves import parted
from models import MODELS
from rewritten import compiled, named_by, same
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor
from torch._inductor import graph as lowering

import mempool.torch
from mempool.torch.compiled import decide, ops, partition
from mempool.torch.compiled.aot_trace import joint_of
from mempool.torch.compiled.constraints import Terms
from mempool.torch.compiled.costs import INSIDE, in_kernels
from mempool.torch.compiled.decide import Deciding
from mempool.torch.compiled.graph_budget import BUDGETS
from mempool.torch.compiled.inductor.donated import donated, handed_over
from mempool.torch.compiled.inductor.kernel_orders import coming, delayed, late
from mempool.torch.compiled.inductor.limit_search import Asked, Extreme, Look, ask
from mempool.torch.compiled.merged_graph import Halves, join
from mempool.torch.compiled.options import parsed
from mempool.torch.compiled.passes.apply import apply
from mempool.torch.compiled.runtime import RUNTIME
from mempool.torch.compiled.step import measured
from solvers.rewriting import Graph, Offload, Reload, Rewriting

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),  # of PyTorch's own modules
]


@st.composite
def compilers(draw: st.DrawFn) -> tuple[int, int, Callable[..., Look[int]], list[tuple[Asked, bool]]]:
    """A limit, the least that may be asked for, and a compiler that needs what it likes."""
    least, limit = draw(st.integers(1, 1000)), draw(st.integers(1, 2000))
    seed = draw(st.integers(0, 1 << 30))
    asked: list[tuple[Asked, bool]] = []

    def look(bytes_: Asked, *, small: bool) -> Look[int]:
        assert isinstance(bytes_, Extreme) or bytes_ >= least
        asked.append((bytes_, small))
        extremes = {Extreme.NOTHING: 2000, Extreme.LEAST: least, Extreme.ALL: least + 1}
        size = extremes[bytes_] if isinstance(bytes_, Extreme) else bytes_
        random = np.random.default_rng([seed, size, small])
        return Look(int(size * random.uniform(0.6, 1.4)), size, random.uniform(0, 0.1), size)

    return limit, least, look, asked


@given(compilers())
def test_what_is_found_was_looked_at_and_holds(given: tuple[Any, ...]) -> None:
    """Or else no extreme does, and what needs least of them is found when that is the limit."""
    limit, least, look, asked = given
    found, holds = ask(limit, least, look)
    assert len(asked) <= 12
    looks = [look(bytes_, small=small) for bytes_, small in asked[:]]
    assert found in looks
    assert holds == (found.peak_bytes <= limit)
    if not holds:
        assert ask(found.peak_bytes, least, look)[1]
        extremes = [look(one, small=small).peak_bytes for one in Extreme for small in (False, True)]
        assert found.peak_bytes == min(extremes)


@given(st.integers(100, 1000), st.floats(0.8, 1.0), st.integers(1, 90))
def test_of_kernels_that_need_a_share_of_what_was_asked_nearly_all_of_a_limit_is_used(
    limit: int, share: float, least: int
) -> None:
    """While the step takes longer than it would without one."""

    def look(asked: int, *, small: bool) -> Look[int]:
        assert not small
        return Look(int(share * asked), asked, 1.0, asked)

    found, holds = ask(limit, least, look)
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
    """As inductor has them, as far as orders go."""

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
    """Kernels in an order in which they can run, copies back among them."""
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
            begun = one(operation=ops.swap_in, size=8)
            ticket = one(begun)
            begun.for_copies = ticket.for_copies = True
            for _ in range(draw(st.integers(0, 3))):
                one()
            one(ticket, operation=ops.swapped_in, size=draw(st.integers(1, 9)))
    return kernels


def loads_of(order: list[Kernel], own: dict[Kernel, int]) -> np.ndarray:
    """Bytes of each kernel and of copies that are under way."""
    place = {kernel: i for i, kernel in enumerate(order)}
    loads = np.array([own[kernel] for kernel in order])
    for one in coming(order):
        loads[place[one.kernels[0]] : place[one.awaited]] += one.size
    return loads


def can_run(order: list[Kernel]) -> bool:
    place = {kernel: i for i, kernel in enumerate(order)}
    return all(place[other] < place[kernel] for kernel in order for other in kernel.before)


@given(programs())
def test_kernels_come_where_their_last_operation_stands(kernels: list[Kernel]) -> None:
    order = late(kernels)
    assert set(order) == set(kernels)
    assert len(order) == len(kernels)
    assert can_run(order)
    for i, kernel in enumerate(order):  # whatever could have come sooner stands later in the program
        ready = [one for one in order[i:] if set(one.before) <= set(order[:i])]
        assert kernel.max_order == min(one.max_order for one in ready)


@given(programs(), st.data())
def test_copies_begin_later_only_where_there_is_too_much(kernels: list[Kernel], data: st.DataObject) -> None:
    """All that copies under way can give back is given back; nothing else changes its place."""
    own = {kernel: data.draw(st.integers(0, 20)) for kernel in kernels}
    limit = data.draw(st.integers(0, 30))
    loads = loads_of(kernels, own)
    order = delayed(kernels, loads, limit)
    assert set(order) == set(kernels)
    assert len(order) == len(kernels)
    assert can_run(order)
    moving = {kernel for one in coming(kernels) for kernel in one.kernels}
    assert [k for k in order if k not in moving] == [k for k in kernels if k not in moving]
    if loads.max() <= limit:
        assert order == kernels
    after = dict(zip(order, loads_of(order, own), strict=True))
    for kernel, load in after.items():
        assert kernel in moving or load <= limit or load == own[kernel]


class Many(nn.Module):
    """A sum over many parts, whose gradients a compiler would add up at once, and pieces put together."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.first(x)
        parts = [(shared * layer(x).sigmoid()).exp() for layer in self.layers]
        return torch.cat(parts, 1).tanh()


def convolutions() -> nn.Module:
    layers = [(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(5)]
    return nn.Sequential(*(one for layer in layers for one in layer), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3))


class Pieces(nn.Module):
    """Nothing but what is put together of pieces, so that groups of kernels end before some that are none."""

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
    """What leaves is made again for each reader, as long as nobody needs it in memory."""

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
    """Where nothing is kept, a kernel reads what leaves for several of its operations."""

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
        (Many, (512, 32), 0.75),
        pytest.param(convolutions, (8, 4, 32, 32), 0.75, marks=pytest.mark.full),
        (Pieces, (512, 64), 0.87),
        (Pieces, (512, 64), 0.94),
        (Inside, (512, 64), 0.86),
        (Inside, (512, 64), 0.94),
        pytest.param(Gelu, (1024, 32), 0.1, marks=pytest.mark.full),
    ],
)
def test_what_is_predicted_of_kernels_is_what_they_take(
    make: Callable[[], nn.Module], shape: tuple[int, ...], share: float
) -> None:
    """To the byte: also what is written over what it is made of, or over what the forward pass has kept."""
    options = {"inner": "inductor", "link": "pcie3"}

    def peak(limit: int) -> tuple[int, int]:
        """As measured in a second step, and as predicted."""
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
        (part,) = BUDGETS[-1].parts.values()
        return measured, part.decided.peak_bytes

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


def test_a_kernel_reads_what_came_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that less is needed than where each of its operations has a copy back of its own."""
    torch.manual_seed(0)
    model, x = Gelu(), torch.randn(1024, 32)

    def least() -> int:
        run = compiled(lambda x: model(x).square().mean(), {"inner": "inductor", "link": "pcie3", "limit": 1})
        with pytest.raises(BackendCompilerFailed) as refused:
            run(x)
        return named_by(refused.value)

    once = least()
    monkeypatch.setattr(
        "mempool.torch.compiled.inductor.fused.shared", lambda _, rewriting, together: rewriting
    )
    assert once < least()


def test_what_leaves_is_in_memory_once() -> None:
    """Inductor would compute it for the copy, and again for whoever else reads it."""
    x, weight = torch.randn(4096, 64), torch.randn(64, 1, requires_grad=True)
    with mempool.torch.install(device="cpu", mode="record") as pool:
        run = compiled(lambda x: (x.sin() @ weight).sum(), {"inner": "inductor", "threshold": 0})
        for _ in range(2):
            before = pool.client.stats()["requested"]["current"]
            pool.client.reset_peaks()
            run(x)
        assert RUNTIME.moved.outs
        assert x.nbytes <= pool.client.stats()["requested"]["peak"] - before < 2 * x.nbytes


@pytest.mark.parametrize("which", [0, 1])
def test_a_sum_of_products_rounds_the_same_whoever_reads_them(
    which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor adds one up with the other, if nobody else reads it: a copy out does."""
    x, weights = torch.randn(64, 512), [torch.randn(512, 64, requires_grad=True) for _ in range(2)]

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x @ weights[0] + (2 * x) @ weights[1]).sin()

    def away(graph: Graph, _: object) -> Rewriting:
        products = [op for op, name in enumerate(graph.names) if name in ("mm", "mm_1")]
        (total,) = (op for op, name in enumerate(graph.names) if name == "add")
        value = int(np.flatnonzero(graph.producer == products[which])[0])
        return Rewriting((Offload(value, (Reload((total,)),)),))

    options = {"inner": "inductor", "threshold": 0}
    expected = compiled(function, {"inner": "inductor"})(x)
    monkeypatch.setattr(decide, "_beyond", away)
    assert same([compiled(function, options)(x).detach()], [expected.detach()])
    assert RUNTIME.moved.outs == 1


class Viewed(nn.Module):
    """Saves a product and a view of it, a result, its input, and a value that nobody else has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        own = y.sin() + y.view(-1, 8, 64).cos().view(-1, 64)
        return own.sin().exp()


def test_only_what_nobody_else_has_may_be_written_over() -> None:
    joint = joint_of(Viewed(), (torch.randn(64, 64),), lambda y: y)
    joined, _ = parted(joint)
    saved = set(joined.halves.handed)
    assert saved >= {"mm", "view", "add"}
    options = parsed({"limit": 1 << 30, "link": "pcie3"})
    step = measured(joined, options)
    going = step.captured.given(range(2))
    assert len(going) == 2
    for terms in (Terms(), Terms(least=True, going=going)):  # what goes is somebody else's all the same
        made = Deciding(step, options, terms).decide()
        inputs = joined.halves.backward.graph.find_nodes(op="placeholder")
        assert [inputs[place].name for place in donated(joined, made)] == ["add"]


class Halved(nn.Module):
    """Of a product both halves may be saved, which the backward graph also takes apart for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = x @ self.weights[0]
        first, second = whole.split(32)
        ordered, _ = (x[:32] @ self.weights[1]).sort(-1)
        ends = [(first * second) @ self.weights[2], (ordered * 2) @ self.weights[3], whole.sin()]
        return torch.stack([end.square().mean() for end in ends]).sum()


def test_what_is_handed_over_under_another_name_is_not_taken_for_what_has_that_name() -> None:
    joint = joint_of(Halved(), (torch.randn(64, 64),), lambda y: y)
    inputs = [node.meta["val"] for node in joint.module.graph.find_nodes(op="placeholder")]
    parts = min_cut_rematerialization_partition(
        joint.module, inputs, num_fwd_outputs=joint.forward_outputs, compiler="inductor"
    )
    joined = join(Halves(*parts, joint.forward_outputs), stale=True)
    options = parsed({"limit": 1 << 30, "link": "pcie3"})
    step = measured(joined, options)
    graph = step.captured.graph
    again = [value for value, op in enumerate(graph.producer) if graph.names[op] in ("mul", "mul_1")]
    made = Deciding(step, options).of(Rewriting((), tuple(again)))
    apply(joined, made.captured, made.rewriting)
    inputs = [node.name for node in joined.halves.backward.graph.find_nodes(op="placeholder")]
    saved = [node.name for node in joined.halves.saved]
    assert {"getitem", "getitem_1", "mm"} <= set(saved)
    assert not {"getitem", "getitem_1"} <= set(inputs)  # so that other names were found for them
    names = {inputs[place] for place in donated(joined, made)}
    assert "mm" in inputs
    assert "mm" not in names  # they have its memory
    halves = {joined.halves.handed[name].name for name in ("getitem", "getitem_1")}
    assert not halves & names
    memories = {handed_over(joined, made)[name] for name in (*halves, "mm")}
    assert len(memories) == 1  # which counts once
    assert "mm_2" in names


def test_inductor_is_told_what_it_may_write_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever PyTorch tells it: here all that the backward graph is given."""
    monkeypatch.setattr(lowering, "get_donated_idxs", lambda: list(range(16)))
    x, gradient = torch.randn(4096, requires_grad=True), torch.randn(4096)
    before = [x.detach().clone(), gradient.clone()]
    compiled(torch.sin, {"inner": "inductor", "limit": 1 << 30, "link": "pcie3"})(x).backward(gradient)
    assert same([x.detach(), gradient], before)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.* bytes are on the device")  # by the tests before
@pytest.mark.usefixtures("one_thread")  # several add up an embedding's gradient in any order
def test_what_is_read_later_is_not_written_over() -> None:
    """A value and a view of it may both be saved, where one of them is to make something again of."""
    model = MODELS["gpt"]()
    batch = model.batch(0, 2)

    def gradients(options: dict[str, Any]) -> list[torch.Tensor]:
        model.zero_grad()
        with inductor.patch({"cpp.simdlen": 1}):
            compiled(model.loss, {"inner": "inductor", "link": "pcie3", **options})(*batch).backward()
        return [one.grad for one in model.parameters() if one.grad is not None]

    expected = gradients({})
    assert same(gradients({"limit": 1 << 40}), expected)
    (part,) = BUDGETS[-1].parts.values()
    plain, limit = part.decided.plain.peak_bytes, 1000
    for _ in range(3):
        try:
            got = gradients({"limit": limit})
            break
        except BackendCompilerFailed as refused:
            limit = named_by(refused)
    assert same(got, expected)
    for share in (0.1, 0.25, 0.4):
        assert same(gradients({"limit": int(limit + share * (plain - limit))}), expected)


def test_of_branches_it_is_told_that_nobody_counts_them() -> None:
    def chosen(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin() @ y, lambda y: y.cos() * 1.0, (x,)).sum()

    with pytest.warns(UserWarning, match="what is needed inside of cond is not known"):
        compiled(chosen, {"inner": "eager", "limit": 1 << 30, "link": "pcie3"})(
            torch.ones(8, 8).requires_grad_()
        )


def test_what_is_inside_of_a_kernel_takes_less_than_by_itself() -> None:
    """Not so what a product reads, what is returned, and products themselves."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = (x.sin() * 2).cos()
        return (y @ y).exp().sum()

    joint = joint_of(nn.Identity(), (torch.randn(8, 8, requires_grad=True),), loss)
    seconds = in_kernels(lambda _: 1.0)
    nodes = [node for node in joint.module.graph.nodes if node.op == "call_function"]
    told = {str(node.target).removesuffix(".default"): seconds(node) for node in reversed(nodes)}
    assert told["aten.mm"] == told["aten.sum"] == told["aten.cos"] == 1.0
    assert told["aten.sin"] == told["aten.exp"] == told["aten.neg"] == INSIDE


def test_a_compiler_that_tells_nothing_of_its_kernels_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then each operation counts by itself."""

    def fails(*_: object, **__: object) -> None:
        raise AttributeError("no such pass")

    monkeypatch.setattr("mempool.torch.compiled.inductor.fused.fitted", fails)
    x = torch.ones(64, 64, requires_grad=True)
    with pytest.warns(UserWarning, match="what fused operations need is not found.*no such pass"):
        compiled(lambda y: y.exp().sin().sum(), {"inner": "inductor", "limit": 1 << 30, "link": "pcie3"})(x)
    (part,) = BUDGETS[-1].parts.values()
    assert part.decided.needed is None
    assert partition.Partition  # the name that is patched above is looked up there when it is needed


@pytest.mark.parametrize("least", [False, True])
def test_the_extremes_are_the_same_whatever_is_measured(least: bool) -> None:
    """So that the least that is told of them is found again when it is the limit, by other times."""
    layers = [nn.Sequential(nn.Linear(96, 96), nn.GELU(), nn.LayerNorm(96)) for _ in range(3)]
    joint = joint_of(nn.Sequential(*layers), (torch.randn(256, 96),), lambda y: y.square().mean())
    joined, _ = parted(joint)
    options = parsed({"limit": 1000, "link": "pcie3"})
    step = measured(joined, options)
    found = []
    for seed in range(2):
        seconds = np.random.default_rng(seed).uniform(1e-6, 1e-3, len(step.captured.graph))
        captured = replace(step.captured, graph=step.captured.graph.with_columns(seconds=seconds))
        found.append(Deciding(replace(step, captured=captured), options, Terms(least=least)))
    for extreme in Extreme:
        one, other = (deciding.extreme(extreme).rewriting for deciding in found)
        assert one == other
    one, other = (deciding.within(deciding.least()).rewriting for deciding in found)
    assert one != other

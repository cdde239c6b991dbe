"""Limits of compiled graphs: held, shared, refused, observed, and kept for dynamic sizes."""

from __future__ import annotations

import gc
import json
import re
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import warnings
from types import SimpleNamespace

from compiled_programs import PLAIN, compiled, same, waves
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import mempool.torch
import mempool.torch.compiled
from mempool.torch.compiled.external_memory import ForwardRun, LiveMemory
from mempool.torch.compiled.records import CompiledGraph
from mempool.torch.compiled.runtime import RUNTIME
from mempool.torch.compiled.runtime_observer import RuntimeObserver
from mempool.torch.compiled.shared_limit import SHARED_LIMITS, SharedLimit
from solvers.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mempool.torch import TensorPool

pytestmark = [
    pytest.mark.usefixtures("no_vectors", "few_objects"),
    pytest.mark.usefixtures("few_objects"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.convolutions:
            x = self.norm(layer(x).relu()) + x.sigmoid()
        return self.head(nn.functional.dropout(x, 0.3).mean((2, 3)))


def step_of(
    pool: TensorPool, options: dict[str, Any], make: type[Net] = Net
) -> tuple[list[torch.Tensor], int]:
    """Return gradients and results of a second training step, and the peak bytes."""
    torch.manual_seed(0)
    gc.collect()
    before = pool.client.stats()["requested"]["current"]
    model = make()
    run = compiled(lambda x: model(x).square().mean(), options)
    for _ in range(2):
        x = torch.randn(8, 4, 32, 32, generator=torch.Generator().manual_seed(1))
        model.zero_grad()
        pool.client.reset_peaks()
        loss = run(x)
        loss.backward()
    peak = pool.client.stats()["requested"]["peak"] - before
    return [loss.detach(), *(p.grad for p in model.parameters()), *model.buffers()], peak


def least_of(options: dict[str, Any]) -> int:
    """Return the least limit that a refusal names."""
    with pytest.raises(Exception, match=r"no step fits in .* needs") as refused:
        compiled(Net(), options)(torch.randn(8, 4, 32, 32)).sum().backward()
    (least,) = re.findall(r"needs ([\d,]+)", str(refused.value))
    return int(least.replace(",", ""))


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of PyTorch's own modules
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_limit_is_held_and_bit_identical(inner: str, pool: TensorPool) -> None:
    options = {"inner": inner}
    plain, peak = step_of(pool, options)
    torch.manual_seed(0)
    least = least_of({**options, "limit": 1000})
    assert least < 0.8 * peak
    got, taken = step_of(pool, {**options, "limit": least, "link": "pcie3"})
    assert same(got, plain)
    assert taken <= least
    assert RUNTIME.counters.offloads > 0
    assert RUNTIME.host_copies == 0


class Broken(Net):
    """A model with a graph break."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.convolutions[:2]:
            x = self.norm(layer(x).relu()) + x.sigmoid()
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of PyTorch's own modules
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_graphs_of_a_function_share_the_limit(inner: str, pool: TensorPool) -> None:
    """Both graphs together hold the limit."""
    options = {"inner": inner}
    plain, peak = step_of(pool, options, Broken)
    limit = int(0.8 * peak)
    got, taken = step_of(pool, {**options, "limit": limit, "link": "pcie3"}, Broken)
    assert same(got, plain)
    assert taken <= limit
    said = mempool.torch.compiled.report()
    ours = [graph for graph in said.graphs if graph["limit_bytes"] == limit]
    assert len(ours) > 1
    assert all(graph["predicted_peak_bytes"] <= limit for graph in ours)
    assert len({graph["function"] for graph in ours}) == len(ours)
    assert ours[0]["function"] in str(said)
    assert ours[0]["outside_bytes"] < ours[1]["outside_bytes"]
    assert json.dumps(said.to_dict())
    assert "values offloaded" in str(said)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of PyTorch's own modules
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_report_measures_both_graphs(inner: str) -> None:
    """Time between the graphs does not count."""
    limit = 1 << 30
    net = Net()
    run = compiled(net, {"inner": inner, "limit": limit})
    batch = torch.randn(8, 4, 32, 32)

    def told() -> dict[str, Any]:
        return next(g for g in mempool.torch.compiled.report().graphs[::-1] if g["limit_bytes"] == limit)

    loss = run(batch).square().sum()
    assert told()["measured_seconds"] is None
    assert "not run yet" in str(mempool.torch.compiled.report())
    loss.backward()
    begun, pause = time.perf_counter(), 0.02
    for _ in range(32):  # the first run is forgotten
        loss = run(batch).square().sum()
        time.sleep(pause)
        loss.backward()
    whole = time.perf_counter() - begun - 32 * pause
    assert 0 < told()["measured_seconds"] <= whole / 16  # of medians: half of the runs took as long
    assert f"measured {told()['measured_seconds']:.4f} s" in str(mempool.torch.compiled.report())


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of PyTorch's own modules
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_cublas_workspaces_count_for_training(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One workspace for the forward thread and one for the backward thread."""
    options = {"inner": inner, "limit": 1000}
    least = least_of(options)
    monkeypatch.setattr("mempool.torch.compiled.costs.cublas_workspace_bytes", lambda _: 1 << 20)
    assert least_of(options) == least + (2 << 20)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of PyTorch's own modules
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_cublas_workspaces_count_for_inference(inner: str, monkeypatch: pytest.MonkeyPatch) -> None:

    def needed() -> int:
        with torch.no_grad(), pytest.warns(UserWarning, match="no backward pass") as said:
            compiled(Net(), {"inner": inner, "limit": 1000})(torch.randn(8, 4, 32, 32))
        texts = [str(one.message) for one in said if "no backward pass" in str(one.message)]
        return max(int(number) for text in texts for number in re.findall(r"needs (\d+) bytes", text))

    least = needed()
    monkeypatch.setattr("mempool.torch.compiled.costs.cublas_workspace_bytes", lambda _: 1 << 20)
    assert needed() == least + (1 << 20)


class Three(nn.Module):
    """Three graphs; the second has the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.part(x, 0, 1)
        torch._dynamo.graph_break()
        x = self.part(x, 1, 4)
        torch._dynamo.graph_break()
        return self.part(x, 4, 5)

    def part(self, x: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        for layer in self.layers[begin:end]:
            x = nn.functional.gelu(layer(x))
            x = x * x.sigmoid() + x.tanh()
        return x


class Torn(nn.Module):
    """The first graph keeps a MiB whose recomputation needs more than the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x[:, :, None].repeat(1, 1, 24).view(512, 64, 8, 3).amax(-1)  # of three times as much
        z = (kept * self.w).sin()
        torch._dynamo.graph_break()
        return (torch.cat([z, z[:486]]) * 2).sum(-1)  # needs nearly as much, and keeps nothing


class Wide(nn.Module):
    """Large by its operations, small by its fused kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(64)), nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x @ self.v).sin()
        z = (y[:, :, None] * self.w).exp().amax(-1).exp().sin() * y
        torch._dynamo.graph_break()
        return (z @ self.v).sin()


def run(make: type[nn.Module], inner: str, limit: int | str, **options: Any) -> None:
    """One step."""
    torch.manual_seed(0)
    step = compiled(make(), {"inner": inner, "limit": limit, "link": "pcie3", **options})
    step(torch.randn(512, 64)).square().sum().backward()


def refusal(make: type[nn.Module], inner: str, limit: int, **options: Any) -> str:
    """Return the error for an infeasible limit."""
    with pytest.raises(BackendCompilerFailed, match="no step fits") as refused:
        run(make, inner, limit, **options)
    assert isinstance(refused.value, PlanError)
    assert re.fullmatch(r'[^\n]+; try limit="[\d.]+[KMG]iB"', str(refused.value))
    inside = Path(torch._dynamo.__file__).parent
    frames = [frame.filename for frame in traceback.extract_tb(refused.value.__traceback__)]
    assert [Path(file).name for file in frames if Path(file).is_relative_to(inside)] in (
        [["eval_frame.py"], ["eval_frame.py"] * 2]  # a module's call has a frame of its own
    )
    return str(refused.value)


@pytest.mark.parametrize(
    ("inner", "share"), [("eager", 90), pytest.param("inductor", 100, marks=pytest.mark.full)]
)
def test_relative_limit_is_a_share_of_the_peak_of_the_largest_graph(inner: str, share: int) -> None:
    run(Three, inner, 1 << 40)
    peaks = [part.decision.peak_bytes for part in SHARED_LIMITS[-1].graphs.values()]
    run(Three, inner, f"{share}%")
    shared = SHARED_LIMITS[-1]
    assert shared.relative_bytes == max(peaks) * share // 100
    for part in shared.graphs.values():
        assert part.options.limit is not None
        assert part.decision.peak_bytes <= part.options.limit <= shared.relative_bytes
        assert inner != "eager" or part.least_limit_bytes <= part.options.limit


def test_refusal_names_a_sufficient_limit_for_all_graphs(nothing_leaves: None) -> None:
    """A slightly larger limit lets the first graph keep much less."""
    run(Torn, "eager", 1 << 40)
    first, _ = SHARED_LIMITS[-1].graphs.values()
    tight = first.decision.peak_bytes - 1
    said = refusal(Torn, "eager", tight)
    named, feasible_limit = (int(re.search(p, said)[1]) for p in (r"needs (\d+)", r"(\d+), which is enough"))  # type: ignore[index]
    assert tight < feasible_limit < 0.99 * named
    run(Torn, "eager", feasible_limit)
    refusal(Torn, "eager", int(0.98 * feasible_limit))


def test_small_host_leads_to_recomputation() -> None:
    """An earlier graph recomputes the values that find no room on the host."""
    run(Wide, "eager", 1 << 40, host_limit=1 << 14)
    first, _ = SHARED_LIMITS[-1].graphs.values()
    assert first.decision.rewriting.recomputed
    assert first.decision.kept_bytes < 512 * 64 * 64 * 4


def test_small_host_accepts_fitting_kernels() -> None:
    """The step exceeds the limit by operations but fits by kernels."""
    run(Wide, "inductor", 1 << 40, host_limit=1 << 14)
    part = SHARED_LIMITS[-1].graphs[min(SHARED_LIMITS[-1].graphs)]
    limit = part.decision.peak_bytes + 1000
    assert limit < part.decision.simulated.peak_bytes
    run(Wide, "inductor", limit, host_limit=1 << 14)


steps = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 100)), max_size=4)


@given(st.lists(steps, max_size=3), st.integers(1, 100), st.integers(1, 250))
def test_feasible_limit_is_nearly_the_least(kept: list[list[tuple[int, int]]], own: int, limit: int) -> None:
    """Compare with a search over all limits, for arbitrary kept bytes of earlier graphs."""

    def keeping(stairs: list[tuple[int, int]], before: int) -> tuple[CompiledGraph, int]:
        def kept_bytes_at(limit: int) -> int:
            return min((kept for least, kept in stairs if least <= limit), default=100)

        decided: Any = SimpleNamespace(kept_bytes=kept_bytes_at(limit))
        unused: Any = None
        part = CompiledGraph(
            0, True, unused, decided, unused, bytes_kept_before=before, kept_bytes_at=kept_bytes_at
        )
        return part, before + kept_bytes_at(limit)

    budget, before = SharedLimit(None), 0
    for frame, stairs in enumerate(kept):
        budget.graphs[frame], before = keeping(stairs, before)
    assert budget.kept_within(9, limit) == budget.bytes_kept_before(9) == before
    least = own + before
    if least <= limit:
        return
    feasible_limit = budget.feasible_limit(9, limit, least)
    holds = [x for x in range(limit, least + 1) if own + budget.kept_within(9, x) <= x]
    assert feasible_limit in holds
    assert feasible_limit - min(holds) <= least * 0.01


def test_live_memory_holds_no_reference() -> None:
    """Inputs, results and saved values count for later graphs and stay weakly referenced."""
    model = nn.Linear(8, 8)
    batch, result, kept = torch.ones(10), torch.ones(20), torch.ones(30)
    live_memory = LiveMemory()
    live_memory.register([model], [batch])
    live_memory.external(0, [batch, model.weight], more=True)
    memories = (
        live_memory.memories(some) for some in ([batch, model.weight], [result, 3], [kept, model.weight])
    )
    live_memory.record_forward(0, ForwardRun(*memories))
    beside = live_memory.external(1, [result], more=True)
    assert (beside.held, beside.kept, beside.own) == (160, 160, 0)
    assert beside.parameters == 4 * (64 + 8)
    assert beside.gradients == 4 * 8  # of the bias, which no graph has read so far
    other = live_memory.external(1, [], more=False)
    assert (other.held, other.kept, other.gradients) == (240, 160, 0)
    again = live_memory.external(0, [batch, model.weight], more=False)
    assert (again.held, again.own) == (0, 200)
    del kept
    assert live_memory.external(1, [result], more=False).held == 40
    live_memory.step()
    assert live_memory.external(1, [result], more=False).held == 0


def test_failed_recompilation_warns_once() -> None:
    observer = RuntimeObserver()
    observer.mark_stale(observer.number("no code", []))
    with pytest.warns(UserWarning, match="more than was counted"):
        observer.discard_stale()
    observer.discard_stale()  # once


#: A limit of the peak of so many rows.
ROWS = 64


def point(rows: int) -> torch.Tensor:
    x = torch.linspace(0, 1, rows * 3).view(rows, 3).requires_grad_()
    torch._dynamo.mark_dynamic(x, 0)
    return x


def plain_peak(rows: int, inner: str = "eager") -> int:
    """Return the peak of a step without copies."""
    compiled(waves, {"inner": inner, "limit": 1 << 40, "link": "pcie3"})(point(rows))
    return SHARED_LIMITS[-1].graphs.popitem()[1].decision.peak_bytes


def compiles(run: Callable[..., Any], sizes: Iterable[int], *, inexact: bool = False) -> list[int]:
    """Return the number of compilations after each size; check each gradient."""
    counted = []
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for rows in sizes:
        x, y = point(rows), point(rows)
        run(x).sum().backward()
        wanted = torch.autograd.grad(waves(y).sum(), y)[0]
        assert torch.allclose(x.grad, wanted) if inexact else torch.equal(x.grad, wanted)
        counted.append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)
    return counted


def moved() -> bool:
    """Return true if the latest graph moves or recomputes any value."""
    (part,) = SHARED_LIMITS[-1].graphs.values()
    return bool(part.decision.rewriting.offloads or part.decision.rewriting.recomputed)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of PyTorch's own modules
@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_unchanged_graphs_recompile_only_above_the_limit(inner: str) -> None:
    limit = plain_peak(ROWS, inner)
    inexact = inner == "inductor"  # as it is without us
    run = compiled(waves, {"inner": inner, "limit": limit, "link": "pcie3"})
    assert compiles(run, (6, 9, 30, 60, 5), inexact=inexact) == [1] * 5
    assert not moved()
    if inexact:  # it is one kernel, of which nothing can leave
        with pytest.raises(Exception, match="no step fits"):
            compiles(run, (ROWS + 2,))
        return
    assert compiles(run, (ROWS + 2, 6)) == [1, 1]
    assert moved()


def test_changed_graphs_recompile_for_larger_sizes() -> None:
    """Smaller sizes keep the decision."""
    run = compiled(waves, {**PLAIN, "limit": plain_peak(ROWS), "link": "pcie3"})
    assert compiles(run, (ROWS + 2, 10, ROWS + 2, ROWS + 4, 5)) == [1, 1, 1, 2, 2]


def test_last_compilation_warns_of_the_missing_limit() -> None:
    run = compiled(waves, {**PLAIN, "limit": plain_peak(ROWS), "link": "pcie3"})
    with torch._dynamo.config.patch(recompile_limit=3):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiles(run, (ROWS + 2, ROWS + 4))
        with pytest.warns(UserWarning, match="compiled 3 times.*recompile_limit"):
            compiles(run, (ROWS + 6,))

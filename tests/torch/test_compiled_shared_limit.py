"""Functions of several graphs share one limit: kept bytes, refusals and feasible limits."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from compiled_programs import compiled, named_limit
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from mempool.torch.compiled.records import CompiledGraph
from mempool.torch.compiled.shared_limit import SHARED_LIMITS, SharedLimit

pytestmark = [
    pytest.mark.usefixtures("few_objects"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),  # of PyTorch's own modules
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


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


class Inside(nn.Module):
    """The function continues after a module with graph breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.three = Three()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.three(x).sin() * x).exp().sin()


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


def run(make: type[nn.Module], inner: str, limit: int, **options: Any) -> None:
    """One step."""
    torch.manual_seed(0)
    step = compiled(make(), {"inner": inner, "limit": limit, "link": "pcie3", **options})
    step(torch.randn(512, 64)).square().sum().backward()


def refusal(make: type[nn.Module], inner: str, limit: int, **options: Any) -> str:
    """Return the error for an infeasible limit."""
    with pytest.raises(BackendCompilerFailed, match="no step fits") as refused:
        run(make, inner, limit, **options)
    assert re.search(r'; try limit="[\d.]+[KMG]iB"\n', str(refused.value))
    return str(refused.value)


def least_of(make: type[nn.Module], inner: str, graphs: int) -> int:
    """Return the limit that refusals lead to, with at most one refusal per graph."""
    limit = 1000
    for _ in range(graphs + 1):
        try:
            run(make, inner, limit)
        except BackendCompilerFailed as refused:
            named = named_limit(refused)
            assert named > limit
            limit = named
        else:
            assert all(part.decision.peak_bytes <= limit for part in SHARED_LIMITS[-1].graphs.values())
            return limit
    raise AssertionError("refused too often")


@pytest.mark.parametrize(
    ("make", "graphs", "inner"),
    [
        pytest.param(Three, 3, "eager", marks=pytest.mark.full),
        pytest.param(Inside, 4, "eager", marks=pytest.mark.full),
        pytest.param(Three, 3, "inductor", marks=pytest.mark.full),
    ],
)
def test_limits_above_the_least_are_held(make: type[nn.Module], graphs: int, inner: str) -> None:
    """From the least limit to the peak without a limit."""
    least = least_of(make, inner, graphs)
    run(make, inner, 1 << 40)
    parts = SHARED_LIMITS[-1].graphs
    assert [parts[number].more for number in sorted(parts)] == [True] * (graphs - 1) + [False]
    assert all(part.kept_bytes_at is None for part in parts.values())
    most = max(part.decision.peak_bytes for part in parts.values())
    assert least < 0.9 * most
    limit = int(least + 0.3 * (most - least))
    run(make, inner, limit)
    assert len(SHARED_LIMITS[-1].graphs) == graphs
    assert all(part.decision.peak_bytes <= limit for part in SHARED_LIMITS[-1].graphs.values())
    refusal(make, inner, int(0.97 * least))


def test_refusal_names_a_sufficient_limit_for_all_graphs() -> None:
    """A slightly larger limit lets the first graph keep much less."""
    nothing_leaves = {"exclude": "*"}
    run(Torn, "eager", 1 << 40, **nothing_leaves)
    first, _ = SHARED_LIMITS[-1].graphs.values()
    tight = first.decision.peak_bytes - 1
    said = refusal(Torn, "eager", tight, **nothing_leaves)
    named, feasible_limit = (int(re.search(p, said)[1]) for p in (r"needs (\d+)", r"(\d+), which is enough"))  # type: ignore[index]
    assert tight < feasible_limit < 0.99 * named
    run(Torn, "eager", feasible_limit, **nothing_leaves)
    refusal(Torn, "eager", int(0.98 * feasible_limit), **nothing_leaves)


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

"""Sizes that are known when a graph runs, under a limit: when it is decided anew, and when nobody decides."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from rewritten import PLAIN, compiled

from mempool.torch.compiled.graph_budget import BUDGETS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

#: A limit of the peak of so many rows.
ROWS = 64


def waves(x: torch.Tensor) -> torch.Tensor:
    return (x.exp().sin() * x.cos().exp()).tanh().exp()


def point(rows: int) -> torch.Tensor:
    x = torch.linspace(0, 1, rows * 3).view(rows, 3).requires_grad_()
    torch._dynamo.mark_dynamic(x, 0)
    return x


def plain_peak(rows: int, inner: str = "eager") -> int:
    """Of a step without copies."""
    compiled(waves, {"inner": inner, "limit": 1 << 40, "link": "pcie3"})(point(rows))
    return BUDGETS[-1].parts.popitem()[1].decided.peak_bytes


def compiles(run: Callable[..., Any], sizes: Iterable[int], *, inexact: bool = False) -> list[int]:
    """How often it has been compiled after each size; each has the right gradient."""
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
    """Whether anything moves in the graph of the last call that was compiled."""
    (part,) = BUDGETS[-1].parts.values()
    return bool(part.decided.rewriting.offloads or part.decided.rewriting.recomputed)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # of PyTorch's own modules
@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_where_nothing_moves_larger_sizes_are_decided_anew_only_over_the_limit(inner: str) -> None:
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


def test_where_something_moves_larger_sizes_are_decided_anew() -> None:
    """Smaller ones need less, and do as was decided."""
    run = compiled(waves, {**PLAIN, "limit": plain_peak(ROWS), "link": "pcie3"})
    assert compiles(run, (ROWS + 2, 10, ROWS + 2, ROWS + 4, 5)) == [1, 1, 1, 2, 2]


def test_before_pytorch_compiles_no_more_it_is_said_that_there_will_be_no_limit() -> None:
    run = compiled(waves, {**PLAIN, "limit": plain_peak(ROWS), "link": "pcie3"})
    with torch._dynamo.config.patch(recompile_limit=3):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiles(run, (ROWS + 2, ROWS + 4))
        with pytest.warns(UserWarning, match="compiled 3 times.*recompile_limit"):
            compiles(run, (ROWS + 6,))

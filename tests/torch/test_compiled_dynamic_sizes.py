"""Dynamic sizes under a limit: recompilation, and the warning before the last compilation."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from compiled_programs import PLAIN, compiled, waves

from mempool.torch.compiled.shared_limit import SHARED_LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

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

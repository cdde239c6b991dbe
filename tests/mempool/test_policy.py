"""Cost of divergence in misses, on sequences recorded from real programs, beside naive policies."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import divergence
import pytest
import sequences

if TYPE_CHECKING:
    from collections.abc import Callable

#: What a policy that keeps to its place by the count alone does as well, to a few allocations.
KEEPS_PLACE = {
    sequences.other_size,
    sequences.swapped,
    sequences.freed_late,
    sequences.exception,
    sequences.other_sizes_from_here,
}
#: What is over after three or four allocations.
SOON = {
    sequences.extra,
    sequences.extra_until_the_end,
    sequences.logged,
    sequences.missing,
    sequences.stretch_left_out,
    sequences.other_size,
    sequences.swapped,
    sequences.exception,
}


def cost(
    names: list[str], policy: str, kind: Callable[..., sequences.Diverged], seed: int
) -> divergence.Cost:
    total = divergence.Cost()
    for name in names:
        total.add(divergence.cost(name, policy, kind, seed))
    return total


@pytest.mark.parametrize("at", range(len(sequences.DIVERGENCES)))
def test_pool_hits_where_the_naive_policies_miss(at: int) -> None:
    """Each kind on one network, each network with several kinds."""
    compare(sequences.DIVERGENCES[at], [sequences.NETWORKS[(at + 1) % len(sequences.NETWORKS)]], seed=0)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("kind", sequences.DIVERGENCES, ids=lambda kind: kind.__name__)
def test_pool_hits_where_the_naive_policies_miss_on_all_networks(
    kind: Callable[..., sequences.Diverged], seed: int
) -> None:
    compare(kind, list(sequences.NETWORKS), seed=seed)


def compare(kind: Callable[..., sequences.Diverged], names: list[str], seed: int) -> None:
    naive = cost(names, "index + guard", kind, seed)
    pool = cost(names, "pool, marks", kind, seed)
    assert pool.overlaps == 0
    assert pool.differences == divergence.DIFFERENCES * len(names)
    missed, naive_missed = pool.allocations - pool.hits, naive.allocations - naive.hits
    if kind in KEEPS_PLACE:
        assert missed <= naive_missed + 0.02 * pool.allocations
    else:
        assert missed <= 0.8 * naive_missed
    if kind in SOON:
        assert statistics.median(pool.recoveries) <= 10


def test_naive_index_policy_hands_out_live_memory() -> None:
    """The observer detects the overlaps; therefore the pool's count of zero is meaningful."""
    assert cost(["gpt"], "index", sequences.extra, 0).overlaps > 0


def test_pool_without_marks_is_not_much_worse_than_with_marks() -> None:
    for kind in (sequences.missing, sequences.evaluation, sequences.extra):
        marks, none = (cost(["unet"], policy, kind, 0) for policy in ("pool, marks", "pool, no marks"))
        assert none.overlaps == 0
        assert none.allocations - none.hits <= 1.5 * (marks.allocations - marks.hits) + 32

"""Cost of copies to the program, and the choice between copies and recompute by that cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rewriting_graphs import chain

from solvers.rewriting import Offload, Reload, Rewriting, Role, apply_rewriting
from solvers.rewriting.copy_overhead import CopyOverhead
from solvers.rewriting.decide import Decider
from solvers.rewriting.judge import simulate
from solvers.swap import Link

LINK = Link(1.0, 1.0, 2.0, 2.0)


@given(st.integers(0, 100), st.integers(0, 100))
def test_copy_uses_the_link_or_program_calls_by_its_size(own_bytes: int, size: int) -> None:
    calls = CopyOverhead(5.0, own_bytes, 3.0, 0.5)
    link, sizes = calls.overlapped(LINK), np.array([size])
    own = 0 < size <= own_bytes
    if size:
        assert link.out(sizes) == (0.0 if own else LINK.out(sizes))
        assert link.back(sizes) == (0.0 if own else LINK.back(sizes))
        assert calls.seconds_of(sizes) == (3.0 + 0.5 * size if own else 5.0)


def test_copies_cost_program_time_and_operations_keep_theirs() -> None:
    graph, calls = chain(3, size=8), CopyOverhead(5.0, 8, 3.0, 0.5)
    made = calls.applied_to(
        apply_rewriting(graph, Rewriting((Offload(1, (Reload((4,), -1),), after=0, release=2),)))
    )
    copies = np.isin(made.role, (Role.OFFLOAD, Role.RELOAD))
    assert made.seconds[copies].tolist() == [7.0, 7.0]
    assert made.seconds[~copies].tolist() == graph.seconds.tolist()
    timed = simulate(made, calls.overlapped(LINK))
    assert timed.stall_seconds == 0
    assert timed.seconds == pytest.approx(graph.seconds.sum() + 14.0)


def test_values_quicker_to_copy_than_to_recompute_are_swapped() -> None:
    """No price a byte separates them: per byte, recomputing the small values takes longer."""
    depth, big, small = 64, 1 << 20, 1 << 16
    graph = chain(depth)
    layer = np.arange(1, len(graph.size))
    even = np.concatenate([[False], (layer <= depth) & (layer % 2 == 0)])
    graph = graph.with_columns(size=np.where(even, small, big), seconds=np.where(even[1:], 40e-6, 500e-6))
    calls = CopyOverhead(0.0, 1 << 62, 20e-6, 1e-10)
    chooser = Decider(graph, calls.overlapped(Link(0.0, 0.0, 0.0, 0.0)), overhead=calls)
    made = chooser.decide(chooser.least()[0] + big + 2 * small)
    assert made.rewriting.recomputed
    assert set(made.rewriting.recomputed) <= set(np.flatnonzero(even).tolist())

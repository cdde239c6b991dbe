"""Properties of the synthetic workloads: the shape of training, at any size, and determinism per seed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces import Buffers, EventType, Trace, workload
from traces.trace import COLUMNS


def between_marks(trace: Trace) -> list[tuple[int, int]]:
    marks = np.flatnonzero(trace.kind == EventType.MARK).tolist()
    return list(itertools.pairwise(marks))


@settings(deadline=None, max_examples=25)
@given(st.integers(9, 400), st.integers(0, 9), st.integers(1, 4), st.booleans(), st.sampled_from([0.0, 0.5]))
def test_iterations_have_the_requested_buffers_and_all_but_the_first_are_alike(
    n: int, seed: int, iterations: int, accesses: bool, replaced: float
) -> None:
    trace = workload.generate(n, seed, iterations=iterations, accesses=accesses, replaced=replaced)
    trace.validate()
    windows = between_marks(trace)
    assert len(windows) == iterations
    shapes = [(trace.kind[a:b].tolist(), trace.size[a:b].tolist()) for a, b in windows]
    assert all(shape == shapes[1] for shape in shapes[2:])
    for kinds, _ in shapes[1:]:
        assert kinds.count(EventType.ALLOC) == n
        assert kinds.count(EventType.FREE) == n


def steady_load(buffers: Buffers) -> np.ndarray:
    """Return the bytes alive after each event of a steady iteration, every instance counted."""
    assert buffers.period is not None
    change = np.zeros(buffers.period, np.int64)
    np.add.at(change, buffers.start, buffers.size)
    np.subtract.at(change, buffers.end % buffers.period, buffers.size)
    at_start = (buffers.size * (buffers.end // buffers.period)).sum()
    return np.cumsum(change) + at_start


@pytest.mark.parametrize("replaced", [0.0, 0.5])
def test_buffers_match_the_repeating_part_of_the_trace(replaced: float) -> None:
    n = 500
    trace = workload.generate(n, 3, iterations=4, replaced=replaced)
    buffers = workload.buffers(n, 3, replaced=replaced)
    assert len(buffers.planned()) == n
    first, last = between_marks(trace)[-1]
    load = trace.load()[first + 1 : last]
    state = buffers.size[buffers.persistent].sum()
    np.testing.assert_array_equal(load - state, steady_load(buffers.planned()))


def test_trace_depends_on_the_seed_only() -> None:
    one, same, other = (workload.generate(200, seed) for seed in (1, 1, 2))
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(one, name), getattr(same, name))
    assert one.size.tolist() != other.size.tolist()

"""Properties of the named packing problems, and determinism per seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from problem_classes import GENERATORS, pinned

from solvers import peak_load, solve
from traces.buffers import COLUMNS

if TYPE_CHECKING:
    from traces import Buffers

SEEDS = range(40)


def same(one: Buffers, other: Buffers) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in COLUMNS)


@settings(max_examples=25)
@given(st.sampled_from(list(GENERATORS)), st.integers(0, 40), st.integers(0, 10**9))
def test_buffer_count_is_exact_and_results_depend_on_the_seed_only(name: str, n: int, seed: int) -> None:
    buffers = GENERATORS[name](n, seed)
    assert len(buffers) == n
    assert same(buffers, GENERATORS[name](n, seed))
    assert n < 2 or not same(buffers, GENERATORS[name](n, seed + 4))
    assert (buffers.size > 0).all()
    assert (buffers.lengths > 0).all()
    assert not buffers.persistent.any()


def test_pinned_buffers_fit_and_even_seeds_reach_the_load() -> None:
    both = 0
    for seed in SEEDS:
        buffers = pinned(12, seed)
        fixed = np.flatnonzero(buffers.offset >= 0)
        both += 0 < len(fixed) < 12
        for i in fixed:
            low, high = buffers.offset[i], buffers.offset[i] + buffers.size[i]
            meets = (buffers.start[fixed] < buffers.end[i]) & (buffers.start[i] < buffers.end[fixed])
            overlap = (buffers.offset[fixed] < high) & (low < buffers.offset[fixed] + buffers.size[fixed])
            assert (meets & overlap).sum() == 1  # itself
        if seed % 2 == 0:
            assert solve(buffers).arena_bytes == peak_load(buffers)
    assert both > len(SEEDS) / 2

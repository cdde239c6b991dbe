"""Properties of the named packing problems, and determinism per seed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import problem_classes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problem_classes import GENERATORS, aligned, circular, flat, pinned, scattered, tight

from solvers import load_curve, peak_load, solve
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


@given(st.integers(1, 60), st.integers(0, 10**9))
def test_tight_buffers_fill_a_rectangle(n: int, seed: int) -> None:
    buffers = tight(n, seed)
    _, loads = load_curve(buffers)
    assert set(loads[:-1].tolist()) == {peak_load(buffers)}


def test_some_tight_buffers_are_pinwheels() -> None:
    """No moment and no address separates the five parts."""

    def separated(begin: np.ndarray, end: np.ndarray) -> bool:
        return any(((end <= at) | (begin >= at)).all() for at in begin[begin > begin.min()])

    parts = [problem_classes._cut(5, np.random.default_rng(seed)) for seed in range(100)]
    whole = [not separated(start, end) and not separated(low, high) for start, end, low, high in parts]
    assert 5 < sum(whole) < 95


def test_alignments_differ_and_sizes_do_not_follow_them() -> None:
    many = [aligned(30, seed) for seed in SEEDS]
    assert sum(len(set(buffers.alignment.tolist())) > 1 for buffers in many) > 0.7 * len(SEEDS)
    assert sum((buffers.size % buffers.alignment != 0).sum() > 15 for buffers in many) > 0.6 * len(SEEDS)


def test_arcs_cross_the_origin_and_some_exceed_the_circle() -> None:
    many = [circular(30, seed) for seed in SEEDS]
    assert sum(bool(buffers.wrap_around.any()) for buffers in many) > 0.9 * len(SEEDS)
    few = [circular(5, seed) for seed in range(400)]
    assert {seed % 4 for seed, buffers in enumerate(few) if buffers.max_instances == 2} == {3}
    assert all(buffers.max_instances <= 2 for buffers in few)


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


@pytest.mark.parametrize("mean_live", [50, 400])
def test_flat_buffers_have_the_same_load_at_all_times(mean_live: int) -> None:
    buffers = flat(100_000, 1, mean_live=mean_live)
    times = np.linspace(20_000, 180_000, 50)
    alive = [((buffers.start <= t) & (t < buffers.end)).sum() for t in times]
    assert np.mean(alive) == pytest.approx(mean_live, rel=0.05)
    assert np.std(alive) < 2 * mean_live**0.5
    assert 64 <= buffers.size.min() < 128
    assert 2**21 < buffers.size.max() < 2**22
    assert same(flat(1000, 5), flat(1000, 5))
    assert [len(flat(n, 0)) for n in (0, 1, 10)] == [0, 1, 10]


def test_half_of_scattered_buffers_are_alive_at_the_peak() -> None:
    buffers = scattered(10_000, 1)
    alive = ((buffers.start <= 10_000) & (buffers.end > 10_000)).sum()
    assert alive == pytest.approx(5_000, rel=0.05)
    assert (buffers.start < buffers.end).all()
    assert same(scattered(1000, 5), scattered(1000, 5))
    assert [len(scattered(n, 0)) for n in (0, 1, 10)] == [0, 1, 10]


def test_a_million_flat_buffers_take_a_second() -> None:
    begin = time.thread_time()
    assert len(flat(1_000_000, 0)) == 1_000_000
    assert time.thread_time() - begin < 20

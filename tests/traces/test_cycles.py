"""Periods of sequences and cycles of iterations, against brute force."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import EventType, Trace
from traces._core import (
    LEAST_EVIDENCE,
    LEAST_EVIDENCE_BUT_RARE,
    LEAST_REPEATS,
    LEAST_REPEATS_BUT_RARE,
    iterations_start,
    iterations_start_without_rare_sizes,
    least_load_position,
    sequence_with_most_bytes,
)
from traces.columns import distinct, numbered
from traces.iterations.cycles import Period, tail_period
from traces.iterations.pattern import find_patterns


def by_hand(values: list[int], repeats: int) -> Period | None:
    """Try every tail and every period, longest tail first: cubic, and plainly right."""
    n = len(values)
    for length in range(n, 0, -1):
        tail = values[n - length :]
        for period in range(1, length // repeats + 1):
            if tail[period:] == tail[: length - period]:
                return Period(period, length, n - length)
    return None


FEW = st.lists(st.integers(0, 2), max_size=24)


@given(FEW, st.integers(2, 4))
def test_tail_period_matches_brute_force(values: list[int], repeats: int) -> None:
    assert tail_period(values, min_repeats=repeats) == by_hand(values, repeats)


@given(FEW, st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(2, 5), st.integers(0, 5))
def test_repetition_is_found_despite_warm_up_and_partial_last_iteration(
    warm_up: list[int], unit: list[int], repeats: int, partial: int
) -> None:
    values = warm_up + unit * repeats + unit[: partial % len(unit)]
    found = tail_period(values)
    assert found is not None
    assert found.length >= repeats * len(unit)
    assert found == by_hand(values, 2)


def test_gradient_accumulation_gives_way_from_the_nested_to_the_whole_period() -> None:
    a, b = [1, 2, 3], [7, 8]
    assert tail_period(a * 3) == Period(3, 9, 0)
    assert tail_period(a * 3 + b) is None
    assert tail_period((a * 3 + b) * 2) == Period(11, 22, 0)
    assert tail_period((a * 3 + b) * 2 + a * 2) == Period(11, 28, 0)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="min_repeats"):
        tail_period([1, 1], min_repeats=1)
    with pytest.raises(TypeError, match="float64"):
        tail_period([1.0, 1.0])


@pytest.mark.parametrize("unit", [[0], [0, 1], [0] * 999 + [1], list(range(50_000))])
def test_tail_period_of_a_million_values_takes_linear_time(unit: list[int]) -> None:
    values = np.tile(unit, 1_000_000 // len(unit))
    begin = time.thread_time()
    found = tail_period(values)
    assert time.thread_time() - begin < 5  # seconds: hundredths on an idle machine, minutes in quadratic time
    assert found == Period(len(unit), len(values), 0)


def begins(sizes: list[int]) -> int | None:
    """Return the start of the longest tail that repeats a period often enough, by brute force."""
    best = None
    for period in range(1, len(sizes) // 2 + 1):
        begin = len(sizes) - period
        while begin > 0 and sizes[begin - 1] == sizes[begin - 1 + period]:
            begin -= 1
        if len(sizes) - begin >= 2 * period and (best is None or begin < best[0]):
            best = begin, period
    if best is None:
        return None
    length = len(sizes) - best[0]
    return best[0] if length >= max(LEAST_EVIDENCE, LEAST_REPEATS * best[1]) else None


def plainly(sequence: list[int], size: list[int]) -> int | None:
    """Compute `iterations_start` by brute force."""
    late = sorted(set(sequence[len(size) // 2 :]))
    if not late:
        return None
    weight = {s: sum(b for a, b in zip(sequence, size, strict=True) if a == s) for s in late}
    for a, b in list(zip(sequence, size, strict=True))[: len(size) // 2]:
        if a in weight:
            weight[a] -= b
    main = max(late, key=lambda s: (weight[s], -s))
    found = {}
    for s in late:
        rows = [i for i, a in enumerate(sequence) if a == s]
        if (begin := begins([size[i] for i in rows])) is not None:
            found[s] = rows[begin]
    return min(found.values()) if main in found else None


PERIODS = st.lists(st.integers(1, 3), min_size=1, max_size=16)
SEQUENCES = st.lists(
    st.tuples(st.lists(st.integers(1, 3), max_size=6), PERIODS, st.integers(0, 80)), min_size=1, max_size=3
)


@given(SEQUENCES, st.randoms(use_true_random=False))
def test_iterations_begin_matches_brute_force(
    parts: list[tuple[list[int], list[int], int]], random: object
) -> None:
    """Sequences repeat after separate beginnings, and are interleaved in any order."""
    queues = [list(warm_up) + (period * 80)[:count] for warm_up, period, count in parts]
    sequence, size = [], []
    while any(queues):
        s = random.choice([i for i, queue in enumerate(queues) if queue])  # type: ignore[attr-defined]
        sequence.append(s)
        size.append(queues[s].pop(0))
    columns = np.array(sequence, np.uint32), np.array(size, np.uint64)
    found = iterations_start(*columns)
    assert (None if found < 0 else found) == plainly(sequence, size)


def test_columns_of_different_lengths_are_refused() -> None:
    """The reader must not read past the shorter column."""
    with pytest.raises(ValueError, match="differ in length"):
        iterations_start(np.zeros(3, np.uint32), np.zeros(2, np.uint64))
    with pytest.raises(ValueError, match="differ in length"):
        iterations_start_without_rare_sizes(np.zeros(300, np.uint32), np.zeros(2, np.uint64))


@pytest.mark.parametrize("varying", [1, 2])
def test_varying_sizes_do_not_hide_the_iteration(varying: int) -> None:
    """The quick and the thorough search both find the iteration, from the same evidence."""
    rng = np.random.default_rng(varying)
    for iterations in (LEAST_REPEATS_BUT_RARE - 1, LEAST_REPEATS_BUT_RARE + 1, 40):
        size = np.tile(np.arange(24) * 1000 + 1000, iterations).reshape(iterations, 24)
        size[:, :varying] = rng.integers(50_000, 1 << 40, (iterations, varying))
        begin = iterations_start_without_rare_sizes(
            np.zeros(size.size, np.uint32), size.ravel().astype(np.uint64)
        )
        kept = (24 - varying) * iterations
        enough = kept >= max(LEAST_EVIDENCE_BUT_RARE, LEAST_REPEATS_BUT_RARE * (24 - varying))
        assert begin == (varying if enough else -1)
        buffer = np.repeat(np.arange(size.size), 2)
        trace = Trace.of(
            kind=np.tile([EventType.ALLOC, EventType.FREE], size.size),
            buffer=buffer,
            size=np.where(np.arange(2 * size.size) % 2, 0, size.ravel()[buffer]),
        )
        patterns = find_patterns(trace)
        assert [len(pattern.buffers) for pattern in patterns] == ([24 - varying] if enough else [])


@st.composite
def living(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int, int]:
    """Return rows, sizes and frees of a sequence among others, the beginning of its periods, and a period."""
    row = np.cumsum(draw(st.lists(st.integers(1, 3), min_size=1, max_size=24))).tolist()
    frees = [draw(st.just(-1) | st.integers(born + 1, row[-1] + 4)) for born in row]
    sizes = [draw(st.integers(0, 4) | st.just(2**57)) for _ in row]
    start = draw(st.integers(0, len(row)))
    return row, sizes, frees, start, draw(st.integers(1, len(row) + 1 - start))


@given(living())
def test_iteration_begins_at_the_lowest_load(
    case: tuple[list[int], list[int], list[int], int, int],
) -> None:
    row, size, freed_before, start, period = case
    # Alive before the sequence's next allocation: born before, and freed at that allocation or later.
    loads = [
        sum(
            size[i]
            for i in range(start, now)
            if freed_before[i] >= 0 and sum(r < freed_before[i] for r in row) > now
        )
        for now in range(start, len(row) + 1)
    ]
    periods = len(loads) // period
    medians = [
        sorted(loads[place : periods * period : period])[(periods - 1) // 2] for place in range(period)
    ]
    found = least_load_position(np.array(row), np.array(size), np.array(freed_before), start, period)
    assert found == medians.index(min(medians))


def test_mismatched_columns_are_refused() -> None:
    rows = np.arange(4)
    for short in range(3):
        given = [rows[: 3 if short == n else 4] for n in range(3)]
        with pytest.raises(ValueError, match="differ in length"):
            least_load_position(*given, 0, 1)
    for start, period in ((5, 1), (0, 0), (0, 6), (4, 2)):
        with pytest.raises(ValueError, match="no period"):
            least_load_position(rows, rows, rows, start, period)
    with pytest.raises(ValueError, match="differ in length"):
        sequence_with_most_bytes(np.zeros(3, np.int32), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="no allocations"):
        sequence_with_most_bytes(np.zeros(0, np.int32), np.zeros(0, np.int64))


@given(st.lists(st.integers(-3, 3) | st.integers(-(2**62), 2**62), max_size=12), st.sampled_from("il"))
def test_numbered_ranks_values_in_ascending_order(values: list[int], kind: str) -> None:
    given = np.array(values, np.int64).astype(kind)
    for shaped in (given, np.stack([given, given[::-1]])):
        found, number = numbered(shaped)
        assert found.tolist() == sorted(set(given.tolist())) == distinct(shaped).tolist()
        assert found.dtype == shaped.dtype
        assert (found[number] == shaped).all()

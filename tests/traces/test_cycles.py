"""Cycles in sequences of sizes, and envelopes of iterations."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
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
from traces.iterations.envelope import FEW_KINDS, SMALLER
from traces.iterations.pattern import find_patterns


def by_hand(values: list[int], repeats: int) -> Period | None:
    """Try every tail and every period, longest tail first, in cubic time."""
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


def iterations_start_by_force(sequence: list[int], size: list[int]) -> int | None:
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
    assert (None if found < 0 else found) == iterations_start_by_force(sequence, size)


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


class Position(NamedTuple):
    """One allocation: fixed bytes, bytes per unit of the batch's length, and lifetime."""

    fixed: int
    each: int
    life: int  # allocations

    def size(self, length: int) -> int:
        return 600 + self.fixed + self.each * length


programs = st.lists(
    st.builds(Position, st.integers(0, 5000), st.sampled_from([0, 0, 8, 100, 2000]), st.integers(1, 12)),
    min_size=3,
    max_size=12,
)


def training(iterations: Sequence[tuple[Sequence[Position], int]]) -> Trace:
    """Return a trace of iterations of the given programs and batch lengths, each after a mark."""
    rows: list[tuple[int, int, int]] = []
    due: list[tuple[int, int]] = []  # when, in allocations, and which buffer
    count = 0
    for program, length in iterations:
        rows.append((EventType.MARK, -1, 0))
        for position in program:
            rows.extend((EventType.FREE, buffer, 0) for when, buffer in due if when <= count)
            due = [(when, buffer) for when, buffer in due if when > count]
            rows.append((EventType.ALLOC, count, position.size(length)))
            due.append((count + position.life, count))
            count += 1
    rows.append((EventType.MARK, -1, 0))
    kind, buffer, size = np.array(rows, np.int64).T
    return Trace.of(kind, buffer, size)


lengths = st.lists(st.integers(10, 400), min_size=8, max_size=30)


@given(programs, lengths)
def test_envelope_has_the_largest_sizes_and_the_common_lifetimes(
    program: list[Position], batches: list[int]
) -> None:
    assume(any(position.each for position in program))
    assume(len(set(batches)) == len(batches))
    assume(sum(length > max(batches[:n]) for n, length in enumerate(batches) if n) < len(batches) / 2)
    (found,) = find_patterns(training([(program, length) for length in batches]), enveloped=())
    assert found.least is not None
    assert found.iterations == found.iterations_seen == len(batches)
    assert found.buffers.size.tolist() == [position.size(max(batches)) for position in program]
    for position, least in zip(program, found.least.tolist(), strict=True):
        smallest, largest = position.size(min(batches)), position.size(max(batches))
        assert least == largest if smallest == largest else smallest // SMALLER <= least <= smallest
    alike = find_patterns(training([(program, max(batches))] * len(batches)))[0]
    assert found.buffers.end.tolist() == alike.buffers.end.tolist()
    assert found.buffers.persistent.tolist() == alike.buffers.persistent.tolist()


PROGRAM = [Position(0, 100, 3), Position(0, 0, 2), Position(50, 8, 6), Position(900, 2000, 1)]
MANY = [(PROGRAM, length) for length in range(40, 240, 10)]
SHUFFLED = random.Random(0).sample(MANY, len(MANY))


@pytest.mark.parametrize("count", [2, FEW_KINDS])
def test_few_variants_become_separate_patterns(count: int) -> None:
    some = [(PROGRAM, 40 + 10 * (number % count)) for number in range(20)]
    found = find_patterns(training(some), enveloped=())
    assert len(found) == count
    assert all(pattern.least is None for pattern in found)


def test_known_envelope_accepts_few_variants() -> None:
    some = training([(PROGRAM, 40 + 10 * (number % 2)) for number in range(9)])
    assert len(find_patterns(some, enveloped=())) == 2
    (found,) = find_patterns(some, enveloped=(len(PROGRAM),))
    assert found.least is not None
    assert found.iterations == 9
    once = training([(PROGRAM, 40), (PROGRAM[:2], 0), (PROGRAM[:3], 0)])
    assert find_patterns(once, enveloped=(len(PROGRAM),)) == []


def test_iterations_with_little_in_common_have_no_envelope() -> None:
    """Large buffers of one are small in the other, so that the envelope is twice as large."""
    other = [Position(0, 2, 4), Position(0, 300, 4), Position(0, 1, 1), Position(0, 1, 1)]
    one = [Position(0, 300, 4), Position(0, 2, 4), Position(0, 1, 1), Position(0, 1, 1)]
    order = random.Random(0).sample(range(20), 20)
    mixed = [((one, other)[n % 2], 200 + n) for n in order]
    assert find_patterns(training(mixed), enveloped=()) == []
    assert len(find_patterns(training([(one, 200 + n) for n in order]), enveloped=())) == 1


def test_other_patterns_are_found_besides_the_envelope() -> None:
    """The others have another count of allocations, such as an evaluation's."""
    evaluation = [Position(77, 0, 1), Position(3000, 0, 1)]
    mixed = [each for pair in zip(SHUFFLED, [(evaluation, 0)] * len(MANY), strict=True) for each in pair]
    one, other = sorted(find_patterns(training(mixed), enveloped=()), key=lambda one: len(one.buffers))
    assert one.least is None
    assert len(one.buffers) == 2
    assert other.least is not None
    assert len(other.buffers) == len(PROGRAM)
    assert set(other.reach) == {one.key}
    assert set(one.reach) == {other.key}


@pytest.mark.parametrize("known", [(), (len(PROGRAM),)])
def test_growing_iterations_have_no_envelope(known: tuple[int, ...]) -> None:
    """The next iteration would outgrow the envelope, as a cache of keys and values does."""
    assert find_patterns(training(MANY), enveloped=known) == []
    assert len(find_patterns(training(MANY[::-1]), enveloped=known)) == 1
    assert len(find_patterns(training([*MANY, *MANY]), enveloped=known)) == 1

"""The envelope of marked iterations that differ in sizes only."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from traces.iterations.envelope import FEW_KINDS, SMALLER
from traces.iterations.pattern import find_patterns
from traces.trace import EventType, Trace

if TYPE_CHECKING:
    from collections.abc import Sequence


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


def test_envelope_needs_the_option_and_marked_iterations() -> None:
    trace = training(SHUFFLED)
    assert find_patterns(trace) == []
    keep = trace.kind != EventType.MARK
    unmarked = Trace.of(trace.kind[keep], trace.buffer[keep], trace.size[keep])
    assert find_patterns(unmarked, enveloped=()) == []


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


def test_envelope_key_differs_from_the_key_of_a_plain_pattern() -> None:
    (found,) = find_patterns(training(SHUFFLED), enveloped=())
    assert found.key != dataclasses.replace(found, least=None).key

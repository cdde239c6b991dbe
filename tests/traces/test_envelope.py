"""The envelope of marked iterations that differ in sizes only."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from traces.envelope import FEW_KINDS, SMALLER
from traces.pattern import find_patterns
from traces.trace import Kind, Trace

if TYPE_CHECKING:
    from collections.abc import Sequence


class Position(NamedTuple):
    """Of one allocation: bytes whatever the batch's length, bytes for each, and when it is freed."""

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
    """Iterations of such programs on batches of such lengths, each after a mark."""
    rows: list[tuple[int, int, int]] = []
    due: list[tuple[int, int]] = []  # when, in allocations, and which buffer
    count = 0
    for program, length in iterations:
        rows.append((Kind.MARK, -1, 0))
        for position in program:
            rows.extend((Kind.FREE, buffer, 0) for when, buffer in due if when <= count)
            due = [(when, buffer) for when, buffer in due if when > count]
            rows.append((Kind.ALLOC, count, position.size(length)))
            due.append((count + position.life, count))
            count += 1
    rows.append((Kind.MARK, -1, 0))
    kind, buffer, size = np.array(rows, np.int64).T
    return Trace.of(kind, buffer, size)


lengths = st.lists(st.integers(10, 400), min_size=8, max_size=30)


@given(programs, lengths)
def test_it_has_the_largest_sizes_and_the_lifetimes_of_all(
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
def test_a_few_lengths_are_a_pattern_each(count: int) -> None:
    some = [(PROGRAM, 40 + 10 * (number % count)) for number in range(20)]
    found = find_patterns(training(some), enveloped=())
    assert len(found) == count
    assert all(pattern.least is None for pattern in found)


def test_so_are_those_that_most_iterations_are_of() -> None:
    some = [(PROGRAM, 40)] * 40 + SHUFFLED[-12:]
    assert [pattern.least for pattern in find_patterns(training(some), enveloped=())] == [None]


def test_of_a_known_one_are_also_a_few() -> None:
    some = training([(PROGRAM, 40 + 10 * (number % 2)) for number in range(9)])
    assert len(find_patterns(some, enveloped=())) == 2
    (found,) = find_patterns(some, enveloped=(len(PROGRAM),))
    assert found.least is not None
    assert found.iterations == 9
    once = training([(PROGRAM, 40), (PROGRAM[:2], 0), (PROGRAM[:3], 0)])
    assert find_patterns(once, enveloped=(len(PROGRAM),)) == []


def test_it_is_found_only_where_it_is_asked_for_and_iterations_are_marked() -> None:
    trace = training(SHUFFLED)
    assert find_patterns(trace) == []
    keep = trace.kind != Kind.MARK
    unmarked = Trace.of(trace.kind[keep], trace.buffer[keep], trace.size[keep])
    assert find_patterns(unmarked, enveloped=()) == []


def test_iterations_with_little_in_common_have_none() -> None:
    """As many allocations, but what is large in one is small in the other: together it is twice as much."""
    other = [Position(0, 2, 4), Position(0, 300, 4), Position(0, 1, 1), Position(0, 1, 1)]
    one = [Position(0, 300, 4), Position(0, 2, 4), Position(0, 1, 1), Position(0, 1, 1)]
    order = random.Random(0).sample(range(20), 20)
    mixed = [((one, other)[n % 2], 200 + n) for n in order]
    assert find_patterns(training(mixed), enveloped=()) == []
    assert len(find_patterns(training([(one, 200 + n) for n in order]), enveloped=())) == 1


def test_others_are_found_beside_it() -> None:
    """Of another count of allocations, such as an evaluation's."""
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
def test_what_grows_with_each_iteration_has_none(known: tuple[int, ...]) -> None:
    """The next one would outgrow it, as a cache of keys and values does."""
    assert find_patterns(training(MANY), enveloped=known) == []
    assert len(find_patterns(training(MANY[::-1]), enveloped=known)) == 1
    assert len(find_patterns(training([*MANY, *MANY]), enveloped=known)) == 1


def test_its_key_is_its_own() -> None:
    """A pattern of the largest sizes is another one."""
    (found,) = find_patterns(training(SHUFFLED), enveloped=())
    assert found.key != dataclasses.replace(found, least=None).key

"""Reach of buffers into the following iteration."""

from __future__ import annotations

import itertools
import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from traces import EventType, Trace
from traces.iterations.pattern import find_patterns
from traces.iterations.transitions import sequence_key

#: Sizes allocated by each variant of iteration; all buffers but the kept ones are freed at once.
KINDS = {"a": [1000, 2000, 3000, 4000], "b": [1100, 2100, 3100], "c": [1200, 2200, 3200, 4200, 5200]}


def program(order: list[str], kept: dict[str, int], frees: dict[tuple[str, str], int]) -> Trace:
    """Return iterations in this order, each keeping a buffer for some allocations of the next."""
    rows: list[tuple[int, int, int]] = []
    held: list[tuple[int, int]] = []  # buffer, allocations of this iteration before its free
    count = 0
    for kind, follower in zip(order, [*order[1:], ""], strict=True):
        rows.append((EventType.MARK, -1, 0))
        here, held = held, []
        for place, size in enumerate(KINDS[kind]):
            rows += [(EventType.FREE, buffer, 0) for buffer, when in here if when == place]
            rows.append((EventType.ALLOC, count, size))
            if place == kept[kind]:
                held.append((count, frees.get((kind, follower), 0)))
            else:
                rows.append((EventType.FREE, count, 0))
            count += 1
        rows += [(EventType.FREE, buffer, 0) for buffer, when in here if when == len(KINDS[kind])]
    kind_of, buffer, size_of = np.array(rows).T
    return Trace.of(kind_of, buffer, size_of)


@given(seed=st.integers(0, 10**6))
def test_reach_matches_the_frees_of_the_program(seed: int) -> None:
    chance = random.Random(seed)
    order = chance.choices(list(KINDS), k=60)
    kept = {kind: chance.randrange(len(sizes)) for kind, sizes in KINDS.items()}
    frees = {(a, b): chance.randint(0, len(KINDS[b])) for a in KINDS for b in KINDS}
    keys = {
        kind: sequence_key(np.array(sizes), np.zeros(len(sizes), np.int32)) for kind, sizes in KINDS.items()
    }
    found = {pattern.key: pattern for pattern in find_patterns(program(order, kept, frees))}
    assert set(found) <= set(keys.values())
    followed = set(itertools.pairwise(order[:-1]))
    for kind, key in keys.items():
        if key not in found:
            continue
        reach = found[key].reach
        assert {follower for follower, k in keys.items() if k in reach} <= {
            b for a, b in followed if a == kind
        }
        for follower in KINDS:
            if (kind, follower) in followed and keys[follower] in found:
                expected = np.zeros(len(KINDS[kind]), np.int64)
                expected[kept[kind]] = frees[kind, follower]
                assert reach[keys[follower]].tolist() == expected.tolist()


def test_reach_is_empty_without_marks() -> None:
    trace = program(["a"] * 12, {"a": 0}, {("a", "a"): 2})
    rows = trace.kind != EventType.MARK
    found = find_patterns(Trace.of(trace.kind[rows], trace.buffer[rows], trace.size[rows]))
    assert found
    assert not any(pattern.reach for pattern in found)


def test_reach_is_empty_if_a_sequence_varies() -> None:
    """The order of events in the next iteration then varies, too."""
    rows: list[tuple[int, int, int, int]] = []
    count = 0
    for number in range(12):
        rows.append((EventType.MARK, -1, 0, 0))
        for place in range(6):
            for thread in (0, 1) if (place + number) % 2 else (1, 0):
                rows.append((EventType.ALLOC, count, 1000 * (thread + 1) + place, thread))
                rows.append((EventType.FREE, count, 0, thread))
                count += 1
    kind, buffer, size, thread = np.array(rows).T
    found = find_patterns(Trace.of(kind, buffer, size, thread=thread))
    assert found
    assert not any(pattern.reach for pattern in found)

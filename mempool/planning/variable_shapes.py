"""Upper-bound patterns to plan: recorded ones, widened to the sizes of known plans.

`traces.iterations.envelope` defines an upper-bound pattern (an envelope): iterations that differ in sizes
only share one pattern with the largest size of each buffer. A recording holds the last iterations only, and
may have lost the largest sizes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from solvers.packing.bounds import peak_load
from traces.iterations.envelope import FEW_KINDS, MOST_LARGER, SMALLER, expected_least

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mempool.planning.planned_pattern import Planned
    from traces.iterations.pattern import Pattern


def lengths(known: Iterable[Planned]) -> tuple[int, ...]:
    """Return the lengths of iterations that share an upper-bound pattern however few are recorded.

    A length is a number of allocations. Included are known upper-bound patterns, and sets of plans that
    differ in sizes only and are more numerous than deserve a plan each.
    """
    alike: dict[bytes, list[Pattern]] = {}
    for planned in known:
        alike.setdefault(planned.pattern.sequence.tobytes(), []).append(planned.pattern)
    return tuple(len(patterns[0].buffers) for patterns in alike.values() if _are_one(patterns))


def _are_one(patterns: Sequence[Pattern]) -> bool:
    if any(pattern.least is not None for pattern in patterns):
        return True
    whole: Pattern | None = patterns[0]
    for other in patterns[1:]:
        whole = whole and _joined(whole, other)
    return len(patterns) > FEW_KINDS and whole is not None


def widened(patterns: Sequence[Pattern], known: Iterable[Planned]) -> list[Pattern]:
    """Return the patterns, upper-bound ones widened to the sizes of known plans of the same order."""
    before = list(known)
    wide = [_widened(pattern, before) for pattern in patterns]
    now = {pattern.key: one.key for pattern, one in zip(patterns, wide, strict=True)}
    return [
        dataclasses.replace(one, reach={now.get(key, key): reach for key, reach in one.reach.items()})
        for one in wide
    ]


def _widened(pattern: Pattern, known: Iterable[Planned]) -> Pattern:
    if pattern.least is None:
        return pattern
    for planned in known:
        if planned.same_order(pattern):
            pattern = _joined(pattern, planned.pattern) or pattern
    return pattern


def _joined(pattern: Pattern, other: Pattern) -> Pattern | None:
    """Return the upper-bound pattern of both; None if the patterns have little in common."""
    (expected, largest), (least, most) = pattern.sizes, other.sizes
    size = np.maximum(largest, most)
    # smallest size of each buffer so far
    smallest = np.where(expected == largest, largest, expected * SMALLER)
    kept = (least <= smallest) & (least < most)
    least = np.where(kept, least, expected_least(np.minimum(smallest, least), size))
    buffers, alone, apart = (
        dataclasses.replace(pattern.buffers, size=each) for each in (size, largest, most)
    )  # with the lifetimes of `pattern`, which may have changed since `other` was planned
    if peak_load(buffers) > MOST_LARGER * max(peak_load(alone), peak_load(apart)):
        return None
    return dataclasses.replace(pattern, buffers=buffers, least=least)

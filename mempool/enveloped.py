"""Envelopes that are planned: what a recording shows of them, as large as they are known to be.

What an envelope is, and when iterations have one, is for `traces.envelope`. A recording holds the last
iterations only, so the largest that ever came may no longer be in it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from solvers.bounds import peak_load
from traces.envelope import FEW_KINDS, MOST_LARGER, SMALLER, expected_least

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mempool.planned import Planned
    from traces.pattern import Pattern


def lengths(known: Iterable[Planned]) -> tuple[int, ...]:
    """How many allocations iterations have that are to be one envelope, however few of them are recorded.

    Those of known envelopes, and of more kinds than are worth a plan each, which came one after the other.
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
    """The same patterns, each envelope so large that all that is known of the same order is within it."""
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
    """The envelope of both; None: they have little in common."""
    (expected, largest), (least, most) = pattern.sizes, other.sizes
    size = np.maximum(largest, most)
    smallest = np.where(expected == largest, largest, expected * SMALLER)  # that came
    kept = (least <= smallest) & (least < most)
    least = np.where(kept, least, expected_least(np.minimum(smallest, least), size))
    buffers, alone, apart = (
        dataclasses.replace(pattern.buffers, size=each) for each in (size, largest, most)
    )  # of the same lifetimes, which may be others now than they were
    if peak_load(buffers) > MOST_LARGER * max(peak_load(alone), peak_load(apart)):
        return None
    return dataclasses.replace(pattern, buffers=buffers, least=least)

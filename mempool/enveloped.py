"""Envelopes that are planned: what a recording shows of them, as large as they are known to be.

What an envelope is, and when iterations have one, is for `traces.envelope`. A recording holds the last
iterations only, so the largest that ever came may no longer be in it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from solvers.bounds import peak_load
from traces.envelope import FEW_KINDS, MOST_LARGER, expected_least

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mempool.planned import Planned
    from traces.pattern import Pattern


def lengths(known: Iterable[Planned]) -> tuple[int, ...]:
    """How many allocations iterations have that are to be one envelope, however few of them are recorded.

    Those of known envelopes, and of more kinds than are worth a plan each, which came one after the other.
    """
    of: dict[tuple[int, bytes], int] = {}
    for planned in known:
        alike = len(planned.buffers), planned.pattern.sequence.tobytes()
        of[alike] = of.get(alike, 0) + (1 if planned.pattern.least is None else FEW_KINDS + 1)
    return tuple(length for (length, _), kinds in of.items() if kinds > FEW_KINDS)


def widened(patterns: Sequence[Pattern], known: Iterable[Planned]) -> list[Pattern]:
    """The same patterns, each envelope so large that all that is known of the same order is within it."""
    before = [planned.pattern for planned in known]
    wide = [_widened(pattern, before) for pattern in patterns]
    now = {pattern.key: one.key for pattern, one in zip(patterns, wide, strict=True)}
    return [
        dataclasses.replace(one, reach={now.get(key, key): reach for key, reach in one.reach.items()})
        for one in wide
    ]


def _widened(pattern: Pattern, known: Iterable[Pattern]) -> Pattern:
    if pattern.least is None:
        return pattern
    for other in known:
        if np.array_equal(other.sequence, pattern.sequence):
            pattern = _joined(pattern, other) or pattern
    return pattern


def _joined(pattern: Pattern, other: Pattern) -> Pattern | None:
    """The envelope of both; None: they have little in common."""
    (one, largest), (two, most) = pattern.sizes, other.sizes
    size, smallest = np.maximum(largest, most), np.minimum(one, two)
    constant = (one == largest) & (two == most)
    least = np.where(constant, expected_least(smallest, size), smallest)
    buffers = dataclasses.replace(pattern.buffers, size=size)
    came = max(peak_load(pattern.buffers), peak_load(other.buffers))
    if peak_load(buffers) > MOST_LARGER * came:
        return None
    return dataclasses.replace(pattern, buffers=buffers, least=least)

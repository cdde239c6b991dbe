"""Envelopes that are planned: what a recording shows of them, as large as they are known to be.

What an envelope is, and when iterations have one, is for `traces.envelope`. A recording holds the last
iterations only, so the largest that ever came may no longer be in it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from solvers.bounds import peak_load
from traces.envelope import MOST_LARGER, expected_least

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mempool.planned import Planned
    from traces.pattern import Pattern


def lengths(known: Iterable[Planned]) -> tuple[int, ...]:
    """How many allocations the iterations of known envelopes have."""
    return tuple(len(planned.buffers) for planned in known if planned.pattern.least is not None)


def widened(patterns: Sequence[Pattern], known: Iterable[Planned]) -> list[Pattern]:
    """The same patterns, each envelope as large as one of the same order that is known, or larger."""
    envelopes = [planned.pattern for planned in known if planned.pattern.least is not None]
    if not envelopes:
        return list(patterns)
    wide = [_widened(pattern, envelopes) for pattern in patterns]
    now = {pattern.key: one.key for pattern, one in zip(patterns, wide, strict=True)}
    return [
        dataclasses.replace(one, reach={now.get(key, key): reach for key, reach in one.reach.items()})
        for one in wide
    ]


def _widened(pattern: Pattern, envelopes: Iterable[Pattern]) -> Pattern:
    for known in envelopes:
        if pattern.least is None or not np.array_equal(known.sequence, pattern.sequence):
            continue
        assert known.least is not None
        size = np.maximum(known.buffers.size, pattern.buffers.size)
        smallest = np.minimum(known.least, pattern.least)
        constant = (known.least == known.buffers.size) & (pattern.least == pattern.buffers.size)
        least = np.where(constant, expected_least(smallest, size), smallest)
        buffers = dataclasses.replace(pattern.buffers, size=size)
        came = max(peak_load(pattern.buffers), peak_load(known.buffers))
        if peak_load(buffers) <= MOST_LARGER * came:
            return dataclasses.replace(pattern, buffers=buffers, least=least)
    return pattern

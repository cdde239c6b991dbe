"""Ranges of addresses or times, half-open."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the union as ranges that neither overlap nor touch, in order."""
    whole: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if whole and begin <= whole[-1][1]:
            whole[-1] = whole[-1][0], max(whole[-1][1], end)
        else:
            whole.append((begin, end))
    return whole

"""Removal of the events of a trace that contradict other events."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from traces.trace import COLUMNS, EventType, Trace

if TYPE_CHECKING:
    from collections import Counter

    from numpy.typing import NDArray


def consistent(trace: Trace, skipped: Counter[str]) -> Trace:
    """Return the possible events: for each buffer, those from its first alloc to the first free after that.

    Args:
        trace: a trace that need not be valid.
        skipped: receives the counts of the removed events, by reason.
    """
    keep = np.ones(len(trace), np.bool_)
    for mask, reason in trace.faults():
        _drop(keep, mask, reason, skipped)
    for mask, reason in _contradictions(trace, np.flatnonzero(keep & trace.of_buffers)):
        _drop(keep, mask, reason, skipped)
    if keep.all():
        return trace
    return dataclasses.replace(trace, **{name: getattr(trace, name)[keep] for name in COLUMNS})


def _drop(keep: NDArray[np.bool_], mask: NDArray[np.bool_], reason: str, skipped: Counter[str]) -> None:
    if count := int((keep & mask).sum()):
        skipped[reason] += count
        keep &= ~mask


def _contradictions(trace: Trace, rows: NDArray[np.int64]) -> list[tuple[NDArray[np.bool_], str]]:
    """Return masks over all events of those among ``rows`` that violate the order of their buffer's life."""
    order = rows[np.argsort(trace.buffer[rows], kind="stable")]  # sorted by buffer, then by time
    opens = np.ones(len(order), np.bool_)
    opens[1:] = trace.buffer[order[1:]] != trace.buffer[order[:-1]]
    mine, at = np.cumsum(opens) - 1, np.arange(len(order))
    kind = trace.kind[order]

    def first(which: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Return the first of each buffer's events that ``which`` marks."""
        found = np.full(int(opens.sum()), len(order), np.int64)
        np.minimum.at(found, mine[which], at[which])
        result: NDArray[np.int64] = found[mine]
        return result

    born = first(kind == EventType.ALLOC)
    dead = first((kind == EventType.FREE) & (at > born))
    found = []
    for mask, reason in (
        ((kind == EventType.ALLOC) & (at > born), "a buffer is allocated a second time"),
        (at < born, "an event of a buffer before its alloc"),
        (at > dead, "an event of a buffer after its free"),
    ):
        of_all = np.zeros(len(trace), np.bool_)
        of_all[order[mask]] = True
        found.append((of_all, reason))
    return found

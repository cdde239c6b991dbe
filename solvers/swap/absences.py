"""Absences: intervals between two accesses in which a buffer can be offloaded, and orders of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.swap.link import Link
    from solvers.swap.step import Step


@dataclass(frozen=True, eq=False)
class Absences:
    """Table of absences, one row each, q in all.

    Attributes:
        buffer: int64[q], row in the step.
        last: int64[q], operation of the previous access, in [0, K).
        use: int64[q], operation of the next access, in (last + 1, last + K].
        size: int64[q], bytes.
        source: int32[q], an absence whose host copy is still valid: the preceding absence of the same buffer,
            if only reads followed it; the row itself, if no operation ever writes the buffer, so that the
            copy of an earlier turn is valid; else -1.
    """

    buffer: NDArray[np.int64]
    last: NDArray[np.int64]
    use: NDArray[np.int64]
    size: NDArray[np.int64]
    source: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.buffer)

    def select(self, rows: NDArray[np.int64]) -> Absences:
        """Return the given rows, without sources."""
        none = np.full(len(rows), -1, np.int32)
        return Absences(self.buffer[rows], self.last[rows], self.use[rows], self.size[rows], none)


def absences_of(step: Step, *, least_bytes: int = 0) -> Absences:
    """Return the absences of at least one operation, including wrap-around, sorted by (buffer, access).

    Args:
        step: the step.
        least_bytes: smaller buffers stay on the device.
    """
    k, owner, op = len(step), step.access_buffer, step.access_op
    first = np.searchsorted(owner, owner)  # for each access, the first access of its buffer
    count = np.searchsorted(owner, owner, side="right") - first
    at = np.arange(len(owner))
    final = at - first == count - 1
    following = np.where(final, first, at + 1)
    use = op[following] + np.where(final, k, 0)
    keep = ~final | step.persistent[owner]
    # A move cannot distinguish the instances of a buffer that outlives a turn.
    keep &= (step.end - step.start)[owner] <= k
    keep &= (use - op > 1) & (use - op <= k) & (step.size[owner] >= max(least_bytes, 1))
    turn = op // max(k, 1)
    last, use = op - turn * k, use - turn * k
    rows = np.flatnonzero(keep)
    return Absences(
        buffer=owner[rows],
        last=last[rows],
        use=use[rows],
        size=step.size[owner[rows]],
        source=_sources(step, rows, following),
    )


def elapsed_seconds(step: Step, first: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the seconds of the operations [first, end); indices may continue into the next turn."""
    k = max(len(step), 1)
    (first_turn, a), (end_turn, b) = np.divmod(first, k), np.divmod(end, k)
    result: NDArray[np.float64] = step.begins[b] - step.begins[a] + step.duration * (end_turn - first_turn)
    return result


def idle_seconds(step: Step, absences: Absences) -> NDArray[np.float64]:
    """Return the seconds from the end of the previous access to the next access, float64[q]."""
    return elapsed_seconds(step, absences.last + 1, absences.use)


def absence_orders(step: Step, link: Link, absences: Absences) -> dict[str, NDArray[np.int32]]:
    """Return all absences, best first, under each score.

    ``early``: by last access, so that the link is busy before the peak. ``late``: latest next use first, so
        that the link is busy after the peak. ``slack``: by the smaller of two ratios, time before the peak to
        copy time out, and time after the peak to copy time back. ``size``, ``area`` and ``time``: by size, by
        size times duration, and by duration, the largest first.
    """
    q, peak = absences, int(step.load.argmax())
    seconds, k = idle_seconds(step, q), len(step)
    at = np.where(peak > q.last, peak, peak + k)
    out_slack = elapsed_seconds(step, q.last + 1, np.maximum(at, q.last + 1)) / np.maximum(
        link.out(q.size), 1e-12
    )
    in_slack = elapsed_seconds(step, np.minimum(at + 1, q.use), q.use) / np.maximum(link.back(q.size), 1e-12)
    keys = {
        "early": q.last,
        "late": -q.use,
        "slack": -np.minimum(out_slack, in_slack),
        "size": -q.size,
        "area": -seconds * q.size,
        "time": -seconds,
    }
    return {name: np.argsort(key, kind="stable").astype(np.int32) for name, key in keys.items()}


def _sources(step: Step, rows: NDArray[np.int64], following: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return `Absences.source` of the absences that begin at the accesses ``rows``."""
    owner = step.access_buffer
    begins = np.full(len(owner), -1, np.int64)
    begins[rows] = np.arange(len(rows))
    before = np.full(len(owner), -1, np.int64)
    before[following] = np.arange(len(following))
    # The first access of a buffer has no predecessor, unless persistent.
    opens = np.searchsorted(owner, owner) == np.arange(len(owner))
    before[opens & ~step.persistent[owner]] = -1
    kept = step.persistent.copy()
    kept[owner[step.access_writes]] = False
    result = np.full(len(rows), -1, np.int32)
    for row, access in enumerate(rows.tolist()):
        if kept[owner[access]]:
            result[row] = row
            continue
        at = access
        while at >= 0 and not step.access_writes[at]:
            at = int(before[at])
            if at >= 0 and begins[at] >= 0:
                result[row] = begins[at]
                break
    return result

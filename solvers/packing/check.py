"""Plan checker, without code of the solvers, so that it does not repeat a solver's bug."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from solvers.errors import PlanError
from traces.buffers import Buffers
from traces.columns import numbered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from solvers.packing.plan import Plan
    from solvers.packing.variants import IterationVariant


#: Longest lifetime, in periods, that the checker accepts, since checking unrolls each lifetime.
_MOST_PERIODS = 64


def check(plan: Plan, buffers: Buffers) -> None:
    """Check that a plan is valid for these buffers.

    The checks: no two buffers alive at the same time overlap, over enough iterations for every pair of
    instances to meet; groups share no addresses; alignments, fixed offsets and the arena size hold; each
    buffer lies within one arena if the plan has several; status, lower bound and arena size agree. Buffers
    without memory (size 0, or no time outside their gaps) may lie anywhere.

    Raises:
        PlanError: the plan is not valid; the message names the buffers.
    """
    offset = _shape(plan, buffers)
    needed = buffers.lengths.copy()  # time in which each buffer needs memory
    np.subtract.at(needed, buffers.gap_buffer, buffers.gap_end - buffers.gap_start)
    rows = np.flatnonzero((buffers.size > 0) & (needed > 0) & ~buffers.persistent)
    _each(plan, buffers, offset, rows)
    _claims(plan)
    _groups(buffers, offset, rows)
    _overlaps(buffers, offset, rows)


def check_variants(variants: Sequence[IterationVariant], plans: Sequence[Plan]) -> None:
    """Check the plans of several iteration variants, any of which may follow any other.

    The lifetime of a buffer that outlives its iteration depends on the next iteration's variant. Every pair
    of consecutive variants is checked and, for buffers that outlive the second iteration, every third variant
    too. The plans must have the same number of columns; consecutive iterations use consecutive columns.

    Raises:
        PlanError: a pair of plans is not valid; the message names the buffers as rows of the first variant
            followed by the rows of the second.
    """
    columns = {plan.columns for plan in plans}
    if len(columns) != 1:
        raise PlanError(f"plans with {sorted(columns)} columns follow upon each other")
    count = next(iter(columns))
    pairs = list(enumerate(zip(variants, plans, strict=True)))
    for (_, (first, plan)), (number, (second, other)) in itertools.product(pairs, repeat=2):
        n, m = len(first), len(second)
        outlives = (first.reach > 0).any(axis=1)
        until = np.where(outlives, n + first.reach[:, number], np.minimum(first.buffers.end, n))
        for column in range(count):
            _check_line((first, plan, column), np.arange(n), until, (second, other, column + 1), n)
        # Times are relative to the beginning of the third iteration, at which all these rows are alive.
        deep = np.flatnonzero(first.reach[:, number] > m)
        beyond = until - (n + m)
        for third, last in zip(variants, plans, strict=True) if len(deep) else ():
            for column in range(count):
                _check_line((first, plan, column), deep, beyond, (third, last, column + 2), 0)


def _check_line(
    first: tuple[IterationVariant, Plan, int],
    rows: NDArray[np.int64],
    until: NDArray[np.int64],
    second: tuple[IterationVariant, Plan, int],
    begun: int,
) -> None:
    """Check that rows of one iteration do not overlap the buffers of a later iteration.

    Args:
        first: variant, plan and column of the earlier iteration.
        rows: rows of the earlier iteration to check.
        until: end of each row's lifetime in the earlier iteration, on the common time line.
        second: variant, plan and column of the later iteration.
        begun: time at which the later iteration begins.
    """
    (variant, plan, column), (other, others_plan, others_column) = first, second
    assert plan.offset is not None and others_plan.offset is not None  # noqa: PT018
    # Later rows of the second iteration do not overlap `rows` in time; pairs of later rows are checked when
    # that iteration is `first`.
    there = np.arange(np.clip(until[rows].max(initial=0) - begun, 0, len(other)))
    ends = np.where((other.reach > 0).any(axis=1), len(other), np.minimum(other.buffers.end, len(other)))
    start = np.concatenate([np.minimum(rows, begun), begun + there])
    end = np.concatenate([until[rows], begun + ends[there]])
    size = np.concatenate([variant.buffers.size[rows], other.buffers.size[there]])
    persistent = np.concatenate([variant.buffers.persistent[rows], other.buffers.persistent[there]])
    offset = np.concatenate(
        [
            plan.offset[rows, column % plan.columns],
            others_plan.offset[there, others_column % plan.columns],
        ]
    )
    taking = np.flatnonzero((size > 0) & (start < end) & ~persistent)
    buffers = Buffers.of(start, np.maximum(start, end), size, persistent=persistent)
    _overlaps(buffers, offset[:, None], taking)


def _shape(plan: Plan, buffers: Buffers) -> NDArray[np.int64]:
    if plan.offset is None:
        raise PlanError(f"there is no plan: {plan.status}{': ' if plan.reason else ''}{plan.reason}")
    if len(plan.offset) != len(buffers):
        raise PlanError(f"a plan for {len(plan.offset)} buffers, not {len(buffers)}")
    if plan.period != buffers.period:
        raise PlanError(f"a plan for period {plan.period}, not {buffers.period}")
    if buffers.period is None and plan.offset.shape[1] != 1:
        raise PlanError(f"{plan.offset.shape[1]} offsets for each buffer that has one instance")
    return plan.offset


def _each(plan: Plan, buffers: Buffers, offset: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    at, size = offset[rows], buffers.size[rows, None]
    fixed = buffers.offset[rows, None]
    for wrong, fault in (
        (at < 0, "has a negative offset"),
        (at > plan.arena_bytes - size, f"ends beyond the arena of {plan.arena_bytes} bytes"),
        (at & (buffers.alignment[rows, None] - 1) != 0, "is not aligned"),
        ((fixed >= 0) & (at != fixed), "is not at its fixed offset"),
    ):
        if wrong.any():
            row, column = rows[wrong.any(axis=1).argmax()], wrong.any(axis=0).argmax()
            raise PlanError(f"{_name(buffers, row)} at {offset[row, column]} {fault}")
    if (offset[buffers.persistent] != -1).any():
        raise PlanError("a persistent buffer has an offset")


def _claims(plan: Plan) -> None:
    if plan.status not in ("optimal", "feasible"):
        raise PlanError(f"a plan with offsets that says it is {plan.status}")
    if plan.lower_bound_bytes > plan.arena_bytes:
        raise PlanError(f"the arena of {plan.arena_bytes} is below its lower bound {plan.lower_bound_bytes}")
    if plan.status == "optimal" and plan.arena_bytes != plan.lower_bound_bytes:
        raise PlanError(f"an optimal arena of {plan.arena_bytes}, but lower bound {plan.lower_bound_bytes}")


def _groups(buffers: Buffers, offset: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    """Check that no address belongs to two groups."""
    group = numbered(buffers.group[rows])[1]
    if group.max(initial=0) == 0:
        return
    row = np.repeat(rows, offset.shape[1])
    low = offset[rows].ravel()
    places, (start, end) = numbered(np.stack([low, low + buffers.size[row]]))
    # One axis with a separate section for each group, in which adjacent buffers are merged to ranges.
    stretch = np.repeat(group, offset.shape[1]) * (len(places) + 1)
    start, end = start + stretch, end + stretch
    order = np.argsort(start, kind="stable")
    reach = np.maximum.accumulate(end[order])
    opens = np.append(True, start[order][1:] > reach[:-1])
    closes = np.append(opens[1:], True)
    base = stretch[order][opens]
    first, last = start[order][opens] - base, reach[closes] - base
    # On the common address axis no ranges may overlap; if any do, so do two neighbours.
    by_address = np.argsort(first, kind="stable")
    bad = np.flatnonzero(first[by_address][1:] < last[by_address][:-1])
    if len(bad):
        address = places[first[by_address[bad[0] + 1]]]
        there = row[(low <= address) & (address < low + buffers.size[row])]
        other = there[buffers.group[there] != buffers.group[there[0]]][0]
        raise PlanError(
            f"{_name(buffers, there[0])} and {_name(buffers, other)} are of different groups "
            f"and share address {address}"
        )


@dataclass(frozen=True, eq=False)
class _Boxes:
    """Rectangles of time and addresses; int64 columns.

    Attributes:
        row: row of the buffer.
        start: rank of the first time among all start and end times.
        end: rank of the first time after the last.
        low: first address.
        high: first address after the last.
    """

    row: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    low: NDArray[np.int64]
    high: NDArray[np.int64]


def _boxes(buffers: Buffers, offset: NDArray[np.int64], rows: NDArray[np.int64]) -> _Boxes:
    """Return boxes of every instance of every buffer over enough iterations, without the gaps.

    Addresses repeat every U iterations, so if two instances overlap, then so do two of which the earlier is
    in the first U iterations and the later at most ceil(longest lifetime / period) iterations behind.
    """
    owner, start, end = _pieces(buffers, rows)
    turns, columns, period = 1, offset.shape[1], 0
    if buffers.period is not None:
        meet = int((-(-buffers.lengths[rows] // buffers.period)).max(initial=1))
        if meet > _MOST_PERIODS:
            raise PlanError(f"a buffer lives {meet} periods, more than {_MOST_PERIODS}")
        turns = max(columns + meet, 2 * meet)
        # Ranks within the period replace times, so that many successive periods fit 64 bits.
        before, within = np.divmod(np.stack([start, end]), buffers.period)
        moments, rank = numbered(within)
        period = len(moments)
        start, end = before * period + rank
    turn = np.repeat(np.arange(turns), len(owner))
    later = turn * period
    owner = np.tile(owner, turns)
    low = offset[owner, turn % columns]
    start, end = np.tile(start, turns) + later, np.tile(end, turns) + later
    start, end = numbered(np.stack([start, end]))[1]
    return _Boxes(owner, start, end, low, low + buffers.size[owner])


def _pieces(
    buffers: Buffers, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return owner, start and end of every piece of lifetime between gaps."""
    gapped = np.isin(buffers.gap_buffer, rows)
    owner = np.concatenate([rows, buffers.gap_buffer[gapped]])
    start = np.concatenate([buffers.start[rows], buffers.gap_end[gapped]])
    order = np.lexsort((start, owner))
    owner, start = owner[order], start[order]
    # A piece ends at the next gap of the buffer, or with the buffer's lifetime.
    end = buffers.end[owner]
    another = np.flatnonzero(owner[1:] == owner[:-1])
    end[another] = buffers.gap_start[gapped]
    keep = start < end
    return owner[keep], start[keep], end[keep]


def _overlaps(buffers: Buffers, offset: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    """Check that no two boxes overlap.

    The algorithm walks a segment tree over time level by level. Each box is the union of whole nodes, at most
    two per level. A box that fills a node overlaps in time with every box that reaches into the node, so
    their addresses must be disjoint. Boxes that only partly cover a node are compared at lower levels.
    """
    box = _boxes(buffers, offset, rows)
    low, high = numbered(np.stack([box.low, box.high]))[1]
    left, right = box.start.copy(), box.end.copy()  # nodes of this level still to be covered, half-open
    level = 0
    while (left < right).any():
        odd, even = (left < right) & (left % 2 == 1), (left < right) & (right % 2 == 1)
        full = np.concatenate([np.flatnonzero(odd), np.flatnonzero(even)])
        node = np.concatenate([left[odd], right[even] - 1])
        left, right = (left + odd) // 2, (right - even) // 2
        if len(full):
            part, within = _reaching(box, level)
            pair = _clash(full, node, part, within, low, high)
            if pair is not None:
                raise PlanError(_overlap(buffers, box, *pair))
        level += 1


def _reaching(box: _Boxes, level: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (box, node) pairs of boxes that reach into a node of this level without filling this node."""
    first, last = box.start >> level, (box.end - 1) >> level
    at_start = (first << level != box.start) | ((first + 1) << level > box.end)
    at_end = ((last + 1) << level != box.end) & (last != first)
    part = np.concatenate([np.flatnonzero(at_start), np.flatnonzero(at_end)])
    return part, np.concatenate([first[at_start], last[at_end]])


def _clash(
    full: NDArray[np.int64],
    node: NDArray[np.int64],
    part: NDArray[np.int64],
    within: NDArray[np.int64],
    low: NDArray[np.int64],
    high: NDArray[np.int64],
) -> tuple[int, int] | None:
    """Return two boxes that overlap in one node, at least one of them filling this node, or None.

    Args:
        full: boxes that fill a node.
        node: the node of each entry of `full`.
        part: boxes that reach into a node without filling the node.
        within: the node of each entry of `part`.
        low: first address of each box, as a rank.
        high: first address after each box, as a rank.
    """
    span = int(high.max()) + 1
    order = np.argsort(node * span + low[full], kind="stable")
    full, node = full[order], node[order]
    key = node * span + low[full]
    bad = np.flatnonzero((node[1:] == node[:-1]) & (high[full[:-1]] > low[full[1:]]))
    if len(bad):
        return int(full[bad[0]]), int(full[bad[0] + 1])
    # Boxes that fill one node are disjoint, so of the boxes that begin below a given address, the last one
    # ends highest.
    filled = np.zeros(max(int(node.max()), int(within.max(initial=0))) + 1, np.bool_)
    filled[node] = True
    near = filled[within]
    part, within = part[near], within[near]
    below = np.searchsorted(key, within * span + high[part]) - 1
    bad = np.flatnonzero((below >= 0) & (node[below] == within) & (high[full[below]] > low[part]))
    return (int(full[below[bad[0]]]), int(part[bad[0]])) if len(bad) else None


def _overlap(buffers: Buffers, box: _Boxes, a: int, b: int) -> str:
    first, second = (f"{_name(buffers, box.row[k])} at [{box.low[k]}, {box.high[k]})" for k in sorted((a, b)))
    return f"{first} and {second} are alive together and overlap"


def _name(buffers: Buffers, row: int) -> str:
    return f"buffer {buffers.name(row)}"

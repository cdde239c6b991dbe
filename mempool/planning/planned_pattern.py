"""Planned pattern: a pattern with its plan, ready for replay by the core."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mempool import _core
from mempool.planning.options import OPTIONS
from mempool.settings import NEVER
from traces.columns import distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from solvers import Plan
    from traces.buffers import Buffers
    from traces.iterations.pattern import Pattern, WarmUp


@dataclass(frozen=True, eq=False)
class PlannedPattern:
    """A pattern, its buffers with the device's alignment, and their planned offsets.

    ``made_with`` is the framework and its version, such as "torch 2.13.0", or empty; for display only.
    ``around`` has the (begin, end) offsets that the plan avoids: of pinned buffers and of other clients'
    plans; ``pinned`` has those of the pinned buffers.
    """

    pattern: Pattern
    buffers: Buffers
    plan: Plan
    made_with: str = ""
    around: Sequence[tuple[int, int]] = ()
    pinned: frozenset[tuple[int, int]] = frozenset()

    @property
    def around_bytes(self) -> int:
        """Bytes of the arena in `around`."""
        return sum(max(min(end, self.plan.arena_bytes) - begin, 0) for begin, end in self.around)

    @property
    def fragmentation(self) -> float:
        """Share of the arena that is unused at the peak; 0.0 for an empty arena."""
        return self.plan.fragmentation(self.peak_load_bytes + self.around_bytes)

    @property
    def peak_load_bytes(self) -> int:
        """Peak load in bytes, every instance counted."""
        from solvers import peak_load

        return peak_load(self.buffers)

    @property
    def key(self) -> bytes:
        """Key that equal sequences share: `traces.iterations.pattern.Pattern.key`."""
        return self.pattern.key

    def same_sequence(self, pattern: Pattern) -> bool:
        """Return true if the other pattern allocates the same sizes in the same order."""
        return self.serves(pattern) and all(
            np.array_equal(mine, theirs)
            for mine, theirs in zip(self.pattern.sizes, pattern.sizes, strict=True)
        )

    def same_order(self, pattern: Pattern) -> bool:
        """Return true if the other pattern has as many allocations, in the same order of sequences."""
        return np.array_equal(self.pattern.sequence, pattern.sequence)

    def serves(self, pattern: Pattern) -> bool:
        """Return true if the plan fits each buffer of the other pattern at the same position."""
        if not self.same_order(pattern):
            return False
        (least, most), (smallest, largest) = self.pattern.sizes, pattern.sizes
        return bool(((least <= smallest) & (largest <= most)).all())

    def serves_shortened(self, pattern: Pattern) -> bool:
        """Return true if the core follows this plan through a shorter pattern without a miss."""
        if len(pattern.buffers) >= len(self.buffers):
            return False
        native, sequence, size = self.native(), pattern.sequence, pattern.buffers.size
        return all(
            native.leads_through(turn, np.ascontiguousarray(size[sequence == turn]))
            for turn in distinct(sequence).tolist()
        )

    def is_rotation_of(self, pattern: Pattern) -> bool:
        """Return true if the other pattern is a rotation of this one."""
        if len(self.buffers) != len(pattern.buffers) or self.same_sequence(pattern):
            return False
        pairs = ((self.buffers, self.pattern.sequence), (pattern.buffers, pattern.sequence))
        mine, theirs = (
            np.stack([buffers.size, sequence.astype(np.int64)], axis=1).tobytes()
            for buffers, sequence in pairs
        )
        doubled, width = mine + mine, 16
        at = doubled.find(theirs)
        while at >= 0 and at % width:
            at = doubled.find(theirs, at + 1)
        return at >= 0

    def is_close_to(self, pattern: Pattern) -> bool:
        """Return true if the other pattern differs in one short section only.

        Such an iteration (the end of an epoch, a log) should follow this plan: the different section misses,
        and buffers that live across the boundary keep their addresses.
        """
        mine, theirs = self.buffers.size, pattern.buffers.size
        shorter, longer = sorted((len(mine), len(theirs)))
        before = mine[:shorter] != theirs[:shorter]
        after = mine[::-1][:shorter] != theirs[::-1][:shorter]
        prefix = int(before.argmax()) if before.any() else shorter
        suffix = int(after.argmax()) if after.any() else shorter
        return prefix + suffix >= OPTIONS.close_patterns * longer

    def underestimates_lifetimes_of(self, pattern: Pattern) -> bool:
        """Return true if a buffer of the same sequence outlives the planned lifetime repeatedly.

        A program may keep any buffer longer once. A plan for that would have other addresses, blocked by live
        buffers, and would need more memory in every iteration without benefit.
        """
        stays = pattern.buffers.persistent & ~self.buffers.persistent
        return bool(stays.any() or ((pattern.lasting > self.buffers.end) & ~self.buffers.persistent).any())

    def extend_lifetimes(self, pattern: Pattern) -> Pattern:
        """Return a pattern of the same sequence with the longer of both lifetimes for each buffer."""
        stays = pattern.buffers.persistent | self.buffers.persistent
        end = np.maximum(pattern.lasting, self.buffers.end)
        return dataclasses.replace(
            pattern,
            buffers=dataclasses.replace(pattern.buffers, end=end, persistent=stays),
            warm_up=pattern.warm_up or self.pattern.warm_up,
        )

    def may_be_improved_by(self, pattern: Pattern) -> bool:
        """Return true if a pattern of the same sequence needs clearly less memory, or has better coverage."""
        from solvers import peak_load

        less = peak_load(pattern.buffers) * OPTIONS.smaller_factor < self.plan.arena_bytes
        return less or pattern.coverage > self.pattern.coverage + OPTIONS.coverage_gain

    def ranges(self) -> set[tuple[int, int]]:
        """Return the (begin, end) offsets of all planned buffers."""
        offset, size = self.plan.offset, self.buffers.size[:, None]
        assert offset is not None
        begin, end = offset[offset >= 0], (offset + size)[offset >= 0]
        return set(zip(begin.tolist(), end.tolist(), strict=True))

    def is_blocked_by(self, ranges: Iterable[tuple[int, int]]) -> bool:
        """Return true if a planned buffer lies in one of these ranges of offsets."""
        offset, size = self.plan.offset, self.buffers.size[:, None]
        assert offset is not None
        return any(
            bool(((offset >= 0) & (offset < end) & (offset + size > begin)).any()) for begin, end in ranges
        )

    def native(self, counts: Sequence[int] | None = None) -> _core.Pattern:
        """Return the plan as a core pattern, ready for installation.

        Args:
            counts: number of allocations of each sequence when the pattern was taken from the recording.
        """
        assert self.plan.offset is not None
        native = _core.Pattern(
            unroll=self.plan.columns, arena_bytes=self.plan.arena_bytes, low_water=self.low_water()
        )
        least = self.pattern.least
        for sequence in self._sequences():
            rows = np.flatnonzero(self.pattern.sequence == sequence)
            phase = 0 if counts is None else counts[sequence] - self.pattern.since.get(sequence, 0)
            native.add_table(
                sequence=sequence,
                stream=int(self.buffers.stream[rows[0]]),
                sizes=np.ascontiguousarray(self.buffers.size[rows]),
                offsets=np.ascontiguousarray(self.plan.offset[rows]),
                phase=phase,
                least=None if least is None else np.ascontiguousarray(least[rows]),
            )
        return native

    def low_water(self) -> int:
        """Return the low-water mark: the allocation of the first sequence before which the load is lowest.

        Returns 0 unless that is clearly less than at the start. The arena is best taken at the low-water
        mark, since buffers alive then stay outside the arena until their next allocation.
        """
        from solvers.packing.bounds import load_curve

        times, loads = load_curve(self.buffers)
        rows = np.flatnonzero(self.pattern.sequence == self._sequences()[0])
        own = np.where(self.buffers.persistent, 0, self.buffers.size)[rows]
        at = np.searchsorted(times, rows, side="right") - 1
        before = np.where(at < 0, 0, loads[at]) - own
        place = int(before.argmin())
        saved = int(before[0] - before[place])
        return place if saved > self.plan.arena_bytes * OPTIONS.low_water_saving else 0

    def native_warm_up(self) -> _core.Pattern | None:
        """Return the warm-up as a core pattern that leads into this one; None if unknown."""
        warm_up = self.pattern.warm_up
        if warm_up is None or len(warm_up.size) == 0:
            return None
        assert self.plan.offset is not None
        native = _core.Pattern(
            cyclic=False,
            marked=len(warm_up.marks) > 0,
            unroll=self.plan.columns,
            arena_bytes=self.plan.arena_bytes,
        )
        offset = self._warm_up_offsets(warm_up)
        least, most = self._warm_up_sizes(warm_up)
        first = self._sequences()[0]
        for sequence in [first, *(s for s in distinct(warm_up.sequence).tolist() if s != first)]:
            mine = warm_up.sequence == sequence
            if not mine.any():
                return None
            before = np.concatenate([[0], np.cumsum(mine)])
            marks = before[warm_up.marks]
            native.add_table(
                sequence=int(sequence),
                stream=0,
                sizes=np.ascontiguousarray(most[mine]),
                least=None if least is None else np.ascontiguousarray(least[mine]),
                offsets=np.repeat(offset[mine][:, None], self.plan.columns, axis=1),
                marks=marks[marks < int(mine.sum())].tolist(),
            )
        return native

    def _warm_up_sizes(self, warm_up: WarmUp) -> tuple[NDArray[np.int64] | None, NDArray[np.int64]]:
        """Return the smallest and the largest size of each warm-up allocation; they differ in an envelope."""
        if self.pattern.least is None:
            return None, warm_up.size
        planned = warm_up.position >= 0
        least, most = warm_up.size.copy(), warm_up.size.copy()
        least[planned], most[planned] = (sizes[warm_up.position[planned]] for sizes in self.pattern.sizes)
        return least, most

    def with_brief_warm_up(self) -> PlannedPattern:
        """Return this plan with a warm-up that ends at the second mark.

        Later iterations of a long warm-up are variants with separate plans. The warm-up would send their
        buffers to the fallback while the arena is idle.
        """
        warm_up = self.pattern.warm_up
        if warm_up is None or len(warm_up.marks) < 3:
            return self
        brief = warm_up.until(int(warm_up.marks[1]))
        return dataclasses.replace(self, pattern=dataclasses.replace(self.pattern, warm_up=brief))

    def _warm_up_offsets(self, warm_up: WarmUp) -> NDArray[np.int64]:
        """Return the offset of each warm-up allocation, from the columns before steady state.

        The core counts one iteration when the warm-up is loaded and one at each mark, so the steady
        state begins in the column after that; earlier instances of a position take the columns before.
        """
        assert self.plan.offset is not None
        offset = np.full(len(warm_up.size), -1, np.int64)
        planned = np.flatnonzero(warm_up.position >= 0)
        position = warm_up.position[planned]
        later = np.zeros(len(planned), np.int64)  # number of later instances of the same position
        seen: dict[int, int] = {}
        for i in range(len(planned) - 1, -1, -1):
            later[i] = seen.get(int(position[i]), 0)
            seen[int(position[i])] = int(later[i]) + 1
        marks = int((warm_up.marks < len(warm_up.size)).sum())  # the last mark may begin the steady state
        column = (1 + marks - later) % self.plan.columns
        offset[planned] = self.plan.offset[position, column]
        return offset

    def _sequences(self) -> list[int]:
        """Return the sequences of the pattern, the one that determines iteration boundaries first."""
        first = int(self.pattern.sequence[0])
        column = self.pattern.sequence
        if column.tobytes() == column[:1].tobytes() * len(column):
            return [first]  # the usual case, without loading more of NumPy's code
        group = self.buffers.group
        main = self.pattern.sequence[group == 0]
        weight = np.bincount(main, weights=self.buffers.size[group == 0].astype(np.float64))
        first = int(weight.argmax())
        return [first, *(s for s in distinct(self.pattern.sequence).tolist() if s != first)]


def are_clearly_better(made: Sequence[PlannedPattern], known: Sequence[PlannedPattern]) -> bool:
    """Return true if plans need clearly less memory than others of the same patterns, or cover more."""
    now, before = (max(each.plan.arena_bytes for each in plans) for plans in (made, known))
    gained = (each.pattern.coverage - old.pattern.coverage for each, old in zip(made, known, strict=True))
    return now * OPTIONS.smaller_factor < before or max(gained) > OPTIONS.coverage_gain


def make_plan(
    pattern: Pattern,
    *,
    alignment: int,
    interrupt: Callable[[], bool] | None = None,
    around: Sequence[tuple[int, int]] = (),
    wait_bytes: int = NEVER,
    alternates: bool = False,
) -> PlannedPattern | None:
    """Plan a pattern and check the plan; return None if interrupted before the first plan.

    Only the native search is used: OR-Tools would add hundreds of modules, a second and some 100 MB to the
    user's program.

    Args:
        pattern: pattern to plan.
        alignment: alignment of every offset, in bytes.
        interrupt: polled now and then; true stops the search.
        around: (begin, end) offsets of ranges that the plan must not use; disjoint.
        wait_bytes: bytes that a plan must save for each wait of one stream for another.
        alternates: see `search`.
    """
    from solvers import check, lower_bound

    rows = pattern.buffers
    buffers = dataclasses.replace(
        rows, alignment=np.full(len(rows), alignment, np.int64), offset=np.full(len(rows), -1, np.int64)
    )
    everything = with_pinned(buffers, around)
    plan = search(everything, wait_bytes=wait_bytes, interrupt=interrupt, alternates=alternates)
    if plan.offset is None:
        return None
    check(plan, everything)
    if around:
        plan = dataclasses.replace(plan, offset=plan.offset[: len(rows)])
        plan = restrict_plan(plan, buffers, lower_bound(buffers))
        check(plan, buffers)
    return PlannedPattern(pattern, buffers, plan, around=around)


def search(
    buffers: Buffers,
    *,
    wait_bytes: int,
    interrupt: Callable[[], bool] | None,
    alternates: bool = False,
) -> Plan:
    """Search for offsets of buffers within the pool's node budget, or that for each number of columns.

    Args:
        buffers: buffers, some of which may have offsets.
        wait_bytes: bytes that a plan must save for each wait of one stream for another.
        interrupt: polled now and then; true stops the search.
        alternates: successive iterations may have different layouts, in turn. Only where memory is short and
            marks count the iterations: what moves tensors to remembered addresses assumes one layout. Each
            number of columns has the node budget then.
    """
    from solvers import Stop
    from solvers.packing.rotation import columns_to_try
    from solvers.packing.streams import solve_streams

    columns = None if alternates or buffers.max_instances > 1 else 1
    nodes = OPTIONS.pool_nodes * (len(columns_to_try(buffers)) if alternates else 1)
    return solve_streams(
        buffers,
        stop=Stop(nodes=nodes, interrupt=interrupt),
        wait_bytes=wait_bytes,
        close_enough=OPTIONS.close_enough,
        columns=columns,
    )


def restrict_plan(plan: Plan, buffers: Buffers, bound: int) -> Plan:
    """Restrict a plan made with pinned ranges to `buffers`: arena, lower bound, status feasible."""
    from solvers import Status

    assert plan.offset is not None
    arena = int((plan.offset + buffers.size[:, None])[plan.offset >= 0].max(initial=0))
    return dataclasses.replace(plan, arena_bytes=arena, lower_bound_bytes=bound, status=Status.FEASIBLE)


def with_pinned(buffers: Buffers, around: Sequence[tuple[int, int]]) -> Buffers:
    """Append one immortal buffer at a fixed offset for each range to avoid."""
    from traces.buffers import COLUMNS, Buffers

    if not around:
        return buffers
    begin, end = np.array(around, np.int64).T
    ever = buffers.period or int(buffers.end.max(initial=0))
    kept: dict[str, Any] = {"start": 0, "end": ever, "size": end - begin, "alignment": 1}
    kept |= {"offset": begin, "group": 0, "stream": buffers.stream[0], "persistent": False}
    table: dict[str, Any] = {
        name: np.concatenate([getattr(buffers, name), np.broadcast_to(kept[name], len(begin))])
        for name in COLUMNS
    }
    gaps = np.stack([buffers.gap_buffer, buffers.gap_start, buffers.gap_end], axis=1)
    return Buffers.of(**table, gaps=gaps, period=buffers.period)

"""Variants of iterations: their successions, joint plans, and upper-bound patterns of variable sizes.

A plan of one variant alone assumes that the variant follows itself, and ignores buffers that another variant
leaves alive. If such buffers block planned slots, all known variants are planned jointly:
`solvers.packing.variants` has the model, `mempool.planning.joint_planning` decides when.

Variants that differ in sizes only share an upper-bound pattern (`traces.iterations.envelope`). A recording
holds the last iterations only and may have lost the largest sizes, so recorded upper-bound patterns are
widened to the sizes of known plans.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mempool.planning.options import OPTIONS
from mempool.planning.planned_pattern import PlannedPattern, restrict_plan, search, with_pinned
from solvers.packing.bounds import peak_load
from solvers.packing.variants import IterationVariant, VariantSet, agree_on_persistent, pack_coupled
from traces.iterations.envelope import FEW_KINDS, MOST_LARGER, SMALLER, expected_least

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from solvers import Plan
    from traces.buffers import Buffers
    from traces.iterations.pattern import Pattern


class VariantLifetimes:
    """Longest observed lifetime of each variant's buffers, by the variant that follows."""

    def __init__(self) -> None:
        """Start without observations."""
        self._ends: dict[bytes, NDArray[np.int64]] = {}
        self._stays: dict[bytes, NDArray[np.bool_]] = {}
        self._reach: dict[tuple[bytes, bytes], NDArray[np.int64]] = {}
        # variants of the last joint plan, in the order of their columns
        self._planned: dict[bytes, IterationVariant] = {}

    def note(self, patterns: Sequence[Pattern], known: Iterable[PlannedPattern]) -> None:
        """Add the lifetimes of `patterns`; forget other patterns that are not in `known`."""
        keys = {pattern.key for pattern in patterns} | {planned.key for planned in known}
        self._ends = {key: ends for key, ends in self._ends.items() if key in keys}
        self._stays = {key: stays for key, stays in self._stays.items() if key in keys}
        self._reach = {pair: reach for pair, reach in self._reach.items() if keys.issuperset(pair)}
        for pattern in patterns:
            key, rows = pattern.key, pattern.buffers
            self._ends[key] = _elementwise_max(self._ends.get(key), rows.end)
            self._stays[key] = self._stays.get(key, rows.persistent) | rows.persistent
            for follower, reach in pattern.reach.items():
                self._reach[key, follower] = _elementwise_max(self._reach.get((key, follower)), reach)

    def supersede(self, key: bytes, former: set[bytes]) -> None:
        """Move the observations of the plans in `former` to plan `key`, which supersedes them."""
        names = dict.fromkeys(former, key)
        reaches, self._reach = self._reach, {}
        for (who, follower), reach in reaches.items():
            pair = names.get(who, who), names.get(follower, follower)
            self._reach[pair] = _elementwise_max(self._reach.get(pair), reach)
        for old_key in former & self._ends.keys():
            self._ends[key] = _elementwise_max(self._ends.get(key), self._ends.pop(old_key))
            stays = self._stays.pop(old_key)
            self._stays[key] = self._stays.get(key, stays) | stays

    def can_be_joined(self, planned: PlannedPattern) -> bool:
        """Return true if this variant's followers and reach are known, and its buffers form one group."""
        return bool(self._observed_reach(planned)) and not planned.buffers.group.any()

    def _observed_reach(self, planned: PlannedPattern) -> dict[bytes, NDArray[np.int64]]:
        """Return the observed reach into each follower, before and after planning."""
        observed = dict(planned.pattern.reach)
        for (key, follower), reach in self._reach.items():
            if key == planned.key:
                observed[follower] = _elementwise_max(observed.get(follower), reach)
        return observed

    def is_outdated(self, known: Sequence[PlannedPattern]) -> bool:
        """Return true if the joint plan is for other variants, or if buffers now outlive their plan."""
        if {planned.key for planned in known} != set(self._planned):
            return True
        for key, variant in self._planned.items():
            rows, n = variant.buffers, len(variant)
            ends, stays = self._ends.get(key, rows.end), self._stays.get(key, rows.persistent)
            longer = (np.minimum(ends, n) > np.minimum(rows.end, n)) & ~variant.outlives
            if ((longer | stays) & ~rows.persistent).any():
                return True
            for number, follower in enumerate(self._planned):
                observed = self._reach.get((key, follower))
                if observed is not None and ((observed > variant.reach[:, number]) & ~rows.persistent).any():
                    return True
        return False

    def of(self, known: Sequence[PlannedPattern]) -> list[IterationVariant] | None:
        """Return the variants with their reach into each other; None if the packing problem is too large.

        A follower that was never observed gets a guessed reach: the longest observed reach into the other
        followers, in allocations or as a share of the follower's length, whichever is longer. If the guesses
        clearly increase the peak load (for example, if variants alternate and never follow themselves),
        unobserved pairs count as impossible.
        """
        if pieces(known) > OPTIONS.max_joint_pieces:
            return None
        guessed = agree_on_persistent([self._variant(planned, known, guesses=True) for planned in known])
        keys = {planned.key for planned in known}
        if all(keys.issubset(self._observed_reach(planned)) for planned in known):
            return guessed
        as_observed = agree_on_persistent([self._variant(planned, known, guesses=False) for planned in known])
        most = OPTIONS.guessed_load_factor * peak_load(VariantSet(as_observed).buffers)
        return guessed if peak_load(VariantSet(guessed).buffers) <= most else as_observed

    def _variant(
        self, planned: PlannedPattern, known: Sequence[PlannedPattern], *, guesses: bool
    ) -> IterationVariant:
        rows, key, n = planned.buffers, planned.key, len(planned.buffers)
        observed = self._observed_reach(planned)
        lengths = {other.key: len(other.buffers) for other in known}
        never = np.zeros(n, np.int64)
        columns = [
            observed[other]
            if other in observed
            else _guess_reach(observed, lengths, length)
            if guesses
            else never
            for other, length in lengths.items()
        ]
        reach, length = np.stack(columns, axis=1), np.array(list(lengths.values()))
        end = np.maximum(self._ends.get(key, rows.end), rows.end)
        unseen = (end > n) & ~reach.any(axis=1)  # the follower was never observed
        reach = np.where(unseen[:, None], np.minimum((end - n)[:, None], length), reach)
        stays = rows.persistent | self._stays.get(key, rows.persistent)
        # The number of iterations that such a buffer lives is unknown.
        stays |= (reach > length + length.min()).any(axis=1)
        buffers = dataclasses.replace(rows, end=end, persistent=stays)
        reach = np.where(stays[:, None], 0, reach)
        return IterationVariant(
            buffers, reach, planned.pattern.sequence.astype(np.int64), planned.pattern.least
        )

    def load(self) -> int:
        """Return the peak load, in bytes, of any succession of the jointly planned variants."""
        return peak_load(VariantSet(list(self._planned.values())).buffers)

    def set_planned(self, known: Sequence[PlannedPattern], variants: Sequence[IterationVariant]) -> None:
        """Record the variants of the last joint plan."""
        self._planned = {planned.key: variant for planned, variant in zip(known, variants, strict=True)}

    def planned(self) -> dict[bytes, IterationVariant]:
        """Return the variants of the last joint plan by key, in the order of their columns."""
        return self._planned

    def adopt(self, known: Sequence[PlannedPattern], variants: Sequence[IterationVariant]) -> None:
        """Adopt variants that another process observed and planned jointly."""
        self.set_planned(known, variants)
        for key, variant in self._planned.items():
            self._ends[key], self._stays[key] = variant.buffers.end, variant.buffers.persistent
            for follower, reach in zip(self._planned, variant.reach.T, strict=True):
                self._reach[key, follower] = reach


def pieces(known: Sequence[PlannedPattern]) -> int:
    """Return an upper bound of the joint packing problem's size, in pieces of lifetime."""
    return 2 * len(known) * sum(len(planned.buffers) for planned in known)


def _elementwise_max(first: NDArray[np.int64] | None, second: NDArray[np.int64]) -> NDArray[np.int64]:
    return second if first is None else np.maximum(first, second)


def _guess_reach(
    observed: dict[bytes, NDArray[np.int64]], long: dict[bytes, int], length: int
) -> NDArray[np.int64]:
    """Guess a variant's reach into a follower of `length` allocations without observations."""
    guesses = []
    for follower, reach in observed.items():
        share = -(-reach * length // long.get(follower, length))
        guesses.append(np.maximum(np.minimum(reach, length), share))
    guess: NDArray[np.int64] = np.max(guesses, axis=0)
    return guess


def make_joint_plans(
    known: Sequence[PlannedPattern],
    variants: Sequence[IterationVariant],
    *,
    alignment: int,
    wait_bytes: int,
    around: Sequence[tuple[int, int]] = (),
    interrupt: Callable[[], bool] | None = None,
) -> list[PlannedPattern] | None:
    """Plan variants jointly, and check that the plans hold in any succession.

    Args:
        known: present plans of the same patterns, to be replaced.
        variants: variant of each plan.
        alignment: alignment of every offset, in bytes.
        wait_bytes: bytes that a plan must save for each wait of one stream for another.
        around: (begin, end) offsets of pinned ranges, which the plans must not use; disjoint.
        interrupt: polled now and then; true stops the search.

    Returns:
        One plan for each variant; None if interrupted before the first plan was found.
    """
    from solvers import check, lower_bound
    from solvers.packing.check import check_variants

    variants = [_align(variant, alignment) for variant in variants]
    joint = VariantSet(variants)
    everything = with_pinned(joint.buffers, around)
    plan = _pack(joint, everything, partial(search, wait_bytes=wait_bytes, interrupt=interrupt), around)
    if plan is None or plan.offset is None:
        return None
    check(plan, everything)
    offsets = joint.offsets(plan.offset[: len(joint.buffers), 0])
    made = []
    for number, (before, variant, offset) in enumerate(zip(known, variants, offsets, strict=True)):
        own = variant.following_itself(number)
        mine = dataclasses.replace(plan, offset=offset, period=len(variant))
        mine = restrict_plan(mine, own, lower_bound(own))
        check(mine, own)
        within = sum(max(min(end, mine.arena_bytes) - begin, 0) for begin, end in around)
        made.append(PlannedPattern(_as_planned(before.pattern, own), own, mine, around_bytes=within))
    check_variants(variants, [planned.plan for planned in made])
    return made


def _pack(
    joint: VariantSet, everything: Buffers, pack: Callable[[Buffers], Plan], around: Sequence[tuple[int, int]]
) -> Plan | None:
    """Return the better of two plans of all variants and pinned ranges; None if interrupted too early."""
    from solvers import Plan, Status, lower_bound

    bound, best = lower_bound(everything), None
    offset = pack_coupled(joint, pack, around=around)
    if offset is not None:
        offset = np.concatenate([offset, everything.offset[len(offset) :]])
        arena = int((offset + everything.size)[offset >= 0].max(initial=0))
        best = Plan(offset[:, None], arena, min(bound, arena), Status.FEASIBLE, "auto", 0, 0.0, "finished")
        if (
            arena <= OPTIONS.good * bound
            or len(everything) + len(everything.gap_buffer) > OPTIONS.joint_search_pieces
        ):
            return best
    plan = pack(everything)
    if best is None or (plan.offset is not None and plan.arena_bytes < best.arena_bytes):
        return plan
    return best


def _as_planned(pattern: Pattern, planned: Buffers) -> Pattern:
    """Return the pattern without the unplanned buffers, with reduced coverage."""
    left = planned.persistent & ~pattern.buffers.persistent
    if not left.any():
        return pattern
    end = np.where(left, len(planned), planned.end)
    everything = dataclasses.replace(planned, end=end, persistent=pattern.buffers.persistent)
    coverage = pattern.coverage * peak_load(planned) / peak_load(everything)
    rows = dataclasses.replace(pattern.buffers, persistent=planned.persistent)
    return dataclasses.replace(pattern, buffers=rows, coverage=coverage)


def _align(variant: IterationVariant, alignment: int) -> IterationVariant:
    rows = variant.buffers
    column = np.full(len(rows), alignment, np.int64)
    return dataclasses.replace(variant, buffers=dataclasses.replace(rows, alignment=column))


def envelope_lengths(known: Iterable[PlannedPattern]) -> tuple[int, ...]:
    """Return the lengths, in allocations, of iterations that share an upper-bound pattern even if rare.

    These are the lengths of known upper-bound patterns, and of sets of plans that differ in sizes only and
    are too numerous for one plan each.
    """
    alike: dict[bytes, list[Pattern]] = {}
    for planned in known:
        alike.setdefault(planned.pattern.sequence.tobytes(), []).append(planned.pattern)
    return tuple(len(patterns[0].buffers) for patterns in alike.values() if _share_an_envelope(patterns))


def _share_an_envelope(patterns: Sequence[Pattern]) -> bool:
    if any(pattern.least is not None for pattern in patterns):
        return True
    whole: Pattern | None = patterns[0]
    for other in patterns[1:]:
        whole = whole and _common_envelope(whole, other)
    return len(patterns) > FEW_KINDS and whole is not None


def widen_envelopes(patterns: Sequence[Pattern], known: Iterable[PlannedPattern]) -> list[Pattern]:
    """Return the patterns, with envelopes widened to known plans of the same order of allocations."""
    before = list(known)
    wide = [_widen(pattern, before) for pattern in patterns]
    now = {pattern.key: widened.key for pattern, widened in zip(patterns, wide, strict=True)}
    return [
        dataclasses.replace(widened, reach={now.get(key, key): reach for key, reach in widened.reach.items()})
        for widened in wide
    ]


def _widen(pattern: Pattern, known: Iterable[PlannedPattern]) -> Pattern:
    if pattern.least is None:
        return pattern
    for planned in known:
        if planned.same_order(pattern):
            pattern = _common_envelope(pattern, planned.pattern) or pattern
    return pattern


def _common_envelope(pattern: Pattern, other: Pattern) -> Pattern | None:
    """Return the upper-bound pattern of both; None if the patterns have little in common."""
    (expected, largest), (least, most) = pattern.sizes, other.sizes
    size = np.maximum(largest, most)
    # smallest size of each buffer so far
    smallest = np.where(expected == largest, largest, expected * SMALLER)
    kept = (least <= smallest) & (least < most)
    least = np.where(kept, least, expected_least(np.minimum(smallest, least), size))
    buffers, alone, apart = (
        dataclasses.replace(pattern.buffers, size=each) for each in (size, largest, most)
    )  # with the lifetimes of `pattern`, which are newer
    if peak_load(buffers) > MOST_LARGER * max(peak_load(alone), peak_load(apart)):
        return None
    return dataclasses.replace(pattern, buffers=buffers, least=least)

"""Variants of iterations: their successions, joint plans, and upper-bound patterns of variable sizes.

A plan of one variant alone assumes that the variant follows itself, and ignores buffers that another variant
leaves alive. If such buffers block planned slots, all known variants are planned jointly;
`solvers.packing.variants` has the model.

Variants that differ in sizes only share an upper-bound pattern (`traces.iterations.envelope`). A recording
holds the last iterations only and may have lost the largest sizes, so recorded upper-bound patterns are
widened to the sizes of known plans.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mempool.planning.options import OPTIONS
from mempool.planning.planned_pattern import PlannedPattern, restrict_plan, search, with_pinned
from mempool.planning.registry import ExponentialBackoff
from solvers.packing.bounds import peak_load
from solvers.packing.variants import IterationVariant, VariantSet, agree_on_persistent, pack_coupled
from traces.iterations.envelope import FEW_KINDS, MOST_LARGER, SMALLER, expected_least

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from mempool.planning.plan_files import SavedPlans
    from solvers import Plan
    from traces.buffers import Buffers
    from traces.iterations.pattern import Pattern


class JointPlanning:
    """Jointly planned variants of one client, and the longest observed lifetimes of each variant's buffers.

    Joint planning is triggered when buffers that one variant leaves alive block another.
    """

    def __init__(self) -> None:
        """Start without observations and joint plans."""
        self._plans: list[PlannedPattern] = []
        #: Variants of the joint plans by key, in the order of their columns.
        self._variants: dict[bytes, IterationVariant] = {}
        self._longest: dict[bytes, Buffers] = {}
        self._reach: dict[tuple[bytes, bytes], NDArray[np.int64]] = {}  # by variant and its follower
        self._backoff = ExponentialBackoff()
        self._allocations = self._occupied = 0  # counters at the last plan
        self._recent_keys: set[bytes] = set()  # keys of variants in the recording at the last check
        self._largest_set = 0  # number of joinable variants at the last check

    def __bool__(self) -> bool:
        return bool(self._plans)

    def includes(self, planned: PlannedPattern) -> bool:
        """Return true if this plan is one of the joint plans."""
        return any(planned is joint_plan for joint_plan in self._plans)

    def plan_installed(self, allocations: int, occupied: int) -> None:
        """Record a new plan; ``occupied``: total number of allocations whose planned slot was occupied."""
        self._allocations, self._occupied = allocations, occupied

    def has_collisions(self, allocations: int, occupied: int) -> bool:
        """Return true if collisions since the last plan justify joint planning.

        With joint plans, if any occurred.
        """
        collisions, passed = occupied - self._occupied, allocations - self._allocations
        return collisions >= (
            1 if self._plans else max(OPTIONS.joint_collisions, OPTIONS.joint_collision_share * passed)
        )

    def candidates(self, known: Iterable[PlannedPattern]) -> list[PlannedPattern]:
        """Return the plans to make jointly: of recently recorded or already joint variants.

        Followers and reach of such a variant are known, and its buffers form one group.
        """
        return [
            planned
            for planned in known
            if (planned.key in self._recent_keys or self.includes(planned))
            and self._observed_reach(planned)
            and not planned.buffers.group.any()
        ]

    def is_due(self, known: Sequence[PlannedPattern], patterns: Sequence[Pattern], iteration: int) -> bool:
        """Return true if these variants need a joint plan: one is new, or a buffer outlives the old plan."""
        self._note(patterns, known)
        joined = self.candidates(known)
        if len(joined) < 2:
            return False
        if len(joined) > self._largest_set:
            self._largest_set, self._backoff = len(joined), ExponentialBackoff()
        return self._backoff.is_allowed(iteration) and self._is_outdated(joined)

    def make(
        self, known: Sequence[PlannedPattern], iteration: int, **options: Any
    ) -> tuple[list[PlannedPattern], list[IterationVariant]] | None:
        """Plan variants jointly; return None if the problem or the arena is too large, or if interrupted.

        Args:
            known: plans of variants that can be planned jointly.
            iteration: number of the present iteration.
            options: see `make_joint_plans`; beside pinned ranges the arena may be of any size.

        Returns:
            Plans and variants for `adopt`.
        """
        self._backoff.record_attempt(iteration)
        if pieces(known) > OPTIONS.max_joint_pieces:
            return None
        variants = self._joint_variants(known)
        made = make_joint_plans(known, variants, **options)
        if made is None:
            return None
        now, before = (max(planned.plan.arena_bytes for planned in plans) for plans in (made, known))
        needed = max(peak_load(VariantSet(variants).buffers), 0 if self else before)
        is_too_large = now > max(before, OPTIONS.joint_arena_factor * needed)
        return None if is_too_large and not options.get("around") else (made, variants)

    def adopt(self, made: Sequence[PlannedPattern], variants: Sequence[IterationVariant]) -> None:
        """Record that these joint plans are in effect."""
        self._plans = list(made)
        self._variants = {planned.key: variant for planned, variant in zip(made, variants, strict=True)}

    def variants(self, known: Sequence[PlannedPattern]) -> dict[int, IterationVariant]:
        """Return the variant of each jointly planned element of `known`, by index."""
        numbers = {planned.key: number for number, planned in enumerate(known) if self.includes(planned)}
        columns = [column for column, key in enumerate(self._variants) if key in numbers]
        if len(columns) < 2:  # the other variants were dropped
            return {}
        return {
            numbers[key]: dataclasses.replace(variant, reach=variant.reach[:, columns])
            for key, variant in self._variants.items()
            if key in numbers
        }

    def load(self, known: Sequence[PlannedPattern], variants: Mapping[int, IterationVariant]) -> None:
        """Adopt plans from a file with the observations of the process that made the plans.

        `variants`: the jointly planned variants, by index in `known`.
        """
        self.adopt([known[number] for number in variants], list(variants.values()))
        for key, variant in self._variants.items():
            self._note_lifetimes(key, variant.buffers)
            for follower, reach in zip(self._variants, variant.reach.T, strict=True):
                self._note_reach(key, follower, reach)

    def _note(self, patterns: Sequence[Pattern], known: Iterable[PlannedPattern]) -> None:
        """Add the lifetimes of `patterns`; forget other patterns that are not in `known`."""
        self._recent_keys = {pattern.key for pattern in patterns}
        keys = self._recent_keys | {planned.key for planned in known}
        self._longest = {key: rows for key, rows in self._longest.items() if key in keys}
        self._reach = {pair: reach for pair, reach in self._reach.items() if keys.issuperset(pair)}
        for pattern in patterns:
            self._note_lifetimes(pattern.key, pattern.buffers)
            for follower, reach in pattern.reach.items():
                self._note_reach(pattern.key, follower, reach)

    def _note_lifetimes(self, key: bytes, rows: Buffers) -> None:
        self._longest[key] = _longer(rows, self._longest.get(key))

    def _note_reach(self, key: bytes, follower: bytes, reach: NDArray[np.int64]) -> None:
        self._reach[key, follower] = np.maximum(self._reach.get((key, follower), 0), reach)

    def _observed_reach(self, planned: PlannedPattern) -> dict[bytes, NDArray[np.int64]]:
        """Return the observed reach into each follower, before and after planning."""
        observed = dict(planned.pattern.reach)
        for (key, follower), reach in self._reach.items():
            if key == planned.key:
                observed[follower] = np.maximum(observed.get(follower, 0), reach)
        return observed

    def _is_outdated(self, known: Sequence[PlannedPattern]) -> bool:
        """Return true if the joint plans are of other variants, or if buffers now outlive their plan."""
        if len(known) != len(self._plans) or not all(map(self.includes, known)):
            return True
        for key, variant in self._variants.items():
            rows, n = variant.buffers, len(variant)
            longest = self._longest.get(key, rows)
            longer = (np.minimum(longest.end, n) > np.minimum(rows.end, n)) & ~variant.outlives
            if ((longer | longest.persistent) & ~rows.persistent).any():
                return True
            for number, follower in enumerate(self._variants):
                observed = self._reach.get((key, follower), 0)
                if ((observed > variant.reach[:, number]) & ~rows.persistent).any():
                    return True
        return False

    def _joint_variants(self, known: Sequence[PlannedPattern]) -> list[IterationVariant]:
        """Return the variants with their reach into each other; 0 into a follower that was never observed."""
        length = np.array([len(planned.buffers) for planned in known])
        variants = []
        for planned in known:
            observed, never = self._observed_reach(planned), np.zeros(len(planned.buffers), np.int64)
            reach = np.stack([observed.get(other.key, never) for other in known], axis=1)
            rows = _longer(planned.buffers, self._longest.get(planned.key))
            beyond = rows.end - len(rows)
            unseen = (beyond > 0) & ~reach.any(axis=1)  # the follower was never observed
            reach = np.where(unseen[:, None], np.minimum(beyond[:, None], length), reach)
            # The number of iterations that such a buffer lives is unknown.
            stays = rows.persistent | (reach > length + length.min()).any(axis=1)
            rows, reach = dataclasses.replace(rows, persistent=stays), np.where(stays[:, None], 0, reach)
            sequence = planned.pattern.sequence.astype(np.int64)
            variants.append(IterationVariant(rows, reach, sequence, planned.pattern.least))
        return agree_on_persistent(variants)


def _longer(rows: Buffers, observed: Buffers | None) -> Buffers:
    """Return buffers with the longer of both lifetimes."""
    if observed is None:
        return rows
    end, stays = np.maximum(rows.end, observed.end), rows.persistent | observed.persistent
    return dataclasses.replace(rows, end=end, persistent=stays)


def pieces(known: Sequence[PlannedPattern]) -> int:
    """Return an upper bound of the joint packing problem's size, in pieces of lifetime."""
    return 2 * len(known) * sum(len(planned.buffers) for planned in known)


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

    aligned = [
        dataclasses.replace(variant.buffers, alignment=np.full(len(variant), alignment, np.int64))
        for variant in variants
    ]
    variants = [dataclasses.replace(v, buffers=rows) for v, rows in zip(variants, aligned, strict=True)]
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
        made.append(PlannedPattern(_as_planned(before.pattern, own), own, mine, around=around))
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
    wide = list(patterns)
    for planned in known:
        for number, pattern in enumerate(wide):
            if pattern.least is not None and planned.same_order(pattern):
                wide[number] = _common_envelope(pattern, planned.pattern) or pattern
    now = {pattern.key: widened.key for pattern, widened in zip(patterns, wide, strict=True)}
    return [
        dataclasses.replace(widened, reach={now.get(key, key): reach for key, reach in widened.reach.items()})
        for widened in wide
    ]


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


def plan_jointly(made: Sequence[PlannedPattern], **options: Any) -> SavedPlans | None:
    """Plan variants jointly, so that each may follow any other, from separately made plans.

    Args:
        made: plans of all variants of a finished recording, with one alignment.
        options: see `make_joint_plans`.

    Returns:
        One plan for each of ``made``, in their order; None if no variant's follower is known, the problem is
        too large, or the search was interrupted before the first plan.
    """
    from mempool.planning.plan_files import SavedPlans

    together = JointPlanning()
    if not together.is_due(made, [planned.pattern for planned in made], 0):
        return None
    joined = together.candidates(made)
    alignment = int(made[0].buffers.alignment.max(initial=1))
    found = together.make(joined, 0, alignment=alignment, **options)
    if found is None:
        return None
    together.adopt(*found)
    instead = {planned.key: planned for planned in found[0]}
    plans = [instead.get(planned.key, planned) for planned in made]
    return SavedPlans(plans, together.variants(plans))

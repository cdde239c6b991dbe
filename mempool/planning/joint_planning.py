"""Joint planning of variants: triggered when buffers that one variant leaves alive block another.

`mempool.planning.variants` holds the observed lifetimes and makes the joint plans.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING

from mempool.planning.options import OPTIONS
from mempool.planning.registry import ExponentialBackoff

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mempool.planning.plan_files import SavedPlans
    from mempool.planning.planned_pattern import PlannedPattern
    from mempool.planning.variants import VariantLifetimes
    from solvers.packing.variants import IterationVariant
    from traces.iterations.pattern import Pattern


class JointPlanning:
    """Jointly planned variants of one client."""

    def __init__(self) -> None:
        """Start without joint plans."""
        self._plans: list[PlannedPattern] = []
        #: Variants of the joint plans in effect, by key; later failed attempts may have had other variants.
        self._variants: dict[bytes, IterationVariant] = {}
        self._backoff = ExponentialBackoff()
        self._allocations = self._occupied = 0  # counters at the last plan
        self._recent_keys: set[bytes] = set()  # keys of variants in the recording at the last check
        self._largest_set = 0  # number of joinable variants at the last check

    def __bool__(self) -> bool:
        return bool(self._plans)

    def includes(self, planned: PlannedPattern) -> bool:
        """Return true if this plan is one of the joint plans."""
        return any(planned is joint_plan for joint_plan in self._plans)

    @cached_property
    def _lifetimes(self) -> VariantLifetimes:
        from mempool.planning.variants import (
            VariantLifetimes,  # imported late, as few programs need the module
        )

        return VariantLifetimes()

    def supersede(self, key: bytes, former: set[bytes]) -> None:
        """Move the observations of the plans in `former` to plan `key`, which supersedes them."""
        if former:
            self._lifetimes.supersede(key, former)

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
        """Return the plans to make jointly: of recently recorded or already joint variants."""
        may = [planned for planned in known if self._lifetimes.can_be_joined(planned)]
        return [planned for planned in may if planned.key in self._recent_keys or self.includes(planned)]

    def is_due(self, known: Sequence[PlannedPattern], patterns: Sequence[Pattern], iteration: int) -> bool:
        """Return true if these variants need a joint plan: one is new, or a buffer outlives the old plan."""
        self._lifetimes.note(patterns, known)
        self._recent_keys = {pattern.key for pattern in patterns}
        joined = self.candidates(known)
        if len(joined) < 2:
            return False
        if len(joined) > self._largest_set:
            self._largest_set, self._backoff = len(joined), ExponentialBackoff()
        if not self._backoff.is_allowed(iteration):
            return False
        incomplete = bool(self._plans) and not all(map(self.includes, joined))
        return incomplete or self._lifetimes.is_outdated(joined)

    def make(
        self,
        known: Sequence[PlannedPattern],
        iteration: int,
        make_plans: Callable[..., list[PlannedPattern] | None],
    ) -> list[PlannedPattern] | None:
        """Plan variants jointly; return None if the problem is too large or the search was interrupted.

        Args:
            known: plans of variants that can be planned jointly.
            iteration: number of the present iteration.
            make_plans: called with plans and variants, such as `variants.make_joint_plans`.
        """
        self._backoff.record_attempt(iteration)
        variants = self._lifetimes.of(known)
        made = None if variants is None else make_plans(known, variants)
        if variants is None or made is None:
            return None
        self._lifetimes.set_planned(known, variants)  # recorded even if the plans are not adopted
        return made

    def is_worth_it(self, made: Sequence[PlannedPattern], known: Sequence[PlannedPattern]) -> bool:
        """Return true if new joint plans need little more memory than `known`, or than the peak load."""
        now, before = (max(planned.plan.arena_bytes for planned in plans) for plans in (made, known))
        return now <= before or now <= OPTIONS.joint_arena_factor * max(
            self._lifetimes.load(), 0 if self else before
        )

    def adopt(self, made: Sequence[PlannedPattern]) -> None:
        """Record that the latest joint plans are in effect."""
        self._plans = list(made)
        self._variants = self._lifetimes.planned()

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
        """Adopt plans from a file; `variants`: the jointly planned variants."""
        if variants:
            plans = [known[number] for number in variants]
            self._lifetimes.adopt(plans, list(variants.values()))
            self.adopt(plans)


def plan_jointly(
    made: Sequence[PlannedPattern], *, wait_bytes: int, interrupt: Callable[[], bool] | None = None
) -> SavedPlans | None:
    """Plan variants jointly, so that each may follow any other, from separately made plans.

        made: plans of all variants of a finished recording, with one alignment. wait_bytes: bytes that a plan
            must save for each wait of one stream for another.
        interrupt: polled now and then; true stops the work.

    Returns:
        One plan for each of ``made``, in their order; None if no variant's follower is known, the problem is
        too large, the search was interrupted before the first plan, or joint plans need clearly more memory.
    """
    from mempool.planning.plan_files import SavedPlans
    from mempool.planning.variants import make_joint_plans

    together = JointPlanning()
    if not together.is_due(made, [planned.pattern for planned in made], 0):
        return None
    joined = together.candidates(made)
    alignment = int(made[0].buffers.alignment.max(initial=1))
    new = together.make(
        joined,
        0,
        lambda known, variants: make_joint_plans(
            known, variants, alignment=alignment, wait_bytes=wait_bytes, interrupt=interrupt
        ),
    )
    if new is None or not together.is_worth_it(new, joined):
        return None
    together.adopt(new)
    instead = {planned.key: planned for planned in new}
    plans = [instead.get(planned.key, planned) for planned in made]
    return SavedPlans(plans, together.variants(plans))

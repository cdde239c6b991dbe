"""Replanner: replaces plans that pinned or foreign buffers block, or that use more memory than needed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from mempool.logs import log
from mempool.planning.options import OPTIONS

if TYPE_CHECKING:
    from mempool import _core
    from mempool.planning.plan_builder import PlanBuilder
    from traces.iterations.pattern import Pattern


class Replanner:
    """Replanner of one client.

    Attributes:
        improves: true if the purpose of the present recording is a smaller plan.
    """

    def __init__(self, client: _core.Client, builder: PlanBuilder) -> None:
        """Start without observations."""
        self._client, self._builder = client, builder
        self.improves = False
        self._ranges_in_use_before: set[tuple[int, int]] | None = (
            None  # ranges in use in the arena some iterations ago
        )

    def replan_for_shared_arena(self) -> bool:
        """Plan around other clients' plans that are alive at the same time; return true if replanned.

        After other clients end, plans use the freed ranges if the arena then becomes clearly smaller.
        """
        builder, others = self._builder, self._builder.neighbors
        collides = others.collides(builder.registry)
        if not collides and not others.may_move_closer():
            return False
        from mempool.planning.planned_pattern import are_clearly_better

        others.avoid_others()
        reaches = others.avoided_ranges()
        if builder.joint:
            blocked = collides and any(known.is_blocked_by(reaches) for known in builder.registry)
            done = builder.plan_jointly(if_smaller=not blocked)
            if blocked and not done:
                others.allow_overlap()
            return done
        done = False
        for known in list(builder.registry):
            blocked = collides and known.is_blocked_by(reaches)
            stays = builder.metadata.avoided_ranges(known.key) & builder.arena_ranges()
            planned = builder.plan(known.pattern, sorted(stays))
            if planned is None or (blocked and not builder.fits_memory(planned)):
                others.allow_overlap()
                return done
            if blocked or are_clearly_better([planned], [known]):
                done = builder.install(planned, None, instead_of=known) or done
        if done:
            log.info("planning beside others on the same memory")
        return done

    def replan_around_pinned(self) -> bool:
        """Plan around pinned buffers that repeatedly block plans; return true if there is a new plan.

        Live buffers do not move. If the pinned buffers keep changing, the backoff makes replanning rarer.
        """
        builder = self._builder
        blockers = self._client.pinned_ranges() if builder.registry else []
        iteration, backoff = builder.iteration(), builder.metadata.replan_backoff
        if not blockers or self.improves or not backoff.is_allowed(iteration):
            return False
        blocked = [known for known in builder.registry if known.is_blocked_by(blockers)]
        stays = self._ranges_to_avoid(set(blockers), iteration)
        if stays is None:
            return False
        backoff.record_attempt(iteration)  # counts even if planning fails
        done, together = False, builder.joint
        if any(map(together.includes, blocked)):
            mine = set[tuple[int, int]]().union(*(known.ranges() for known in builder.registry))
            done = builder.plan_jointly(sorted((stays - mine) | stays.intersection(blockers)))
            blocked = [
                known for known in builder.registry if known in blocked and not together.includes(known)
            ]
        for known in [builder.registry.latest] if builder.registry.latest in blocked else blocked:
            assert known is not None
            around = sorted(stays - known.ranges() | stays.intersection(blockers))
            planned = builder.plan(known.pattern, around)
            if planned is None or not builder.fits_memory(planned):
                return done
            log.info("planning around %d buffers that stay in the arena", len(around))
            self._client.note_decision("around", count=len(around))
            if builder.install(planned, None, instead_of=known):
                builder.metadata.set_avoided_ranges(planned.key, around)
        return done or bool(blocked)

    def _ranges_to_avoid(self, blockers: set[tuple[int, int]], iteration: int) -> set[tuple[int, int]] | None:
        """Return the arena ranges to avoid: the blockers, and ranges that may block the next plan.

        A range that was in use some iterations ago and is in use now is pinned. Returns None without an
        earlier observation.
        """
        now = self._builder.arena_ranges()
        if self._ranges_in_use_before is None:
            self._ranges_in_use_before = now
            self._builder.metadata.replan_backoff.forbid_before(iteration + OPTIONS.pinned_iterations)
            return None
        seen, self._ranges_in_use_before = self._ranges_in_use_before, None
        return now & (blockers | seen)

    def may_improve(self) -> bool:
        """Return true if any plan may use more memory than needed."""
        return bool(self._builder.metadata.improvable)

    def recording_begins(self) -> None:
        """Handle the start of a recording, which serves to improve plans if any can be improved."""
        self.improves = self.may_improve() and self._client.state()["replaying"]
        self._ranges_in_use_before = self._builder.arena_ranges() if self.improves else None

    def improve(self, pattern: Pattern, counts: list[int]) -> bool:
        """Replace the plan of a pattern if the plan uses more memory than needed; return true on success.

        Causes of excess memory are lifetimes that were temporarily longer, and buffers that were pinned or
        accumulated.

        Args:
            pattern: the most frequent pattern of the recording.
            counts: number of allocations of each sequence so far.
        """
        from mempool.planning.planned_pattern import are_clearly_better

        self.improves = False
        builder, improvable = self._builder, self._builder.metadata.improvable
        stays = builder.arena_ranges() & (self._ranges_in_use_before or set())
        self._ranges_in_use_before = None
        known = builder.registry.find(pattern)
        if known is None or known.key not in improvable or not known.may_be_improved_by(pattern):
            return False
        same = known.same_sequence(pattern)
        around = sorted(stays - known.ranges())
        if same and pattern.warm_up is None:
            pattern = dataclasses.replace(pattern, warm_up=known.pattern.warm_up)
        planned = builder.plan(pattern, around)
        if planned is None or not are_clearly_better([planned], [known]):
            return False
        log.info("planned for less than before")
        options: dict[str, Any] = {"counts": None, "instead_of": known} if same else {"counts": counts}
        builder.install(planned, **options)
        if not around and pattern.coverage >= OPTIONS.min_coverage:
            improvable -= {known.key, planned.key}
        return True

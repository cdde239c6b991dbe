"""Plan builder: makes plans of recurring patterns, installs the plans in the core, and replaces them.

`mempool.planning.learner` selects the patterns to plan.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mempool.logs import log
from mempool.planning.options import OPTIONS
from mempool.planning.registry import ExponentialBackoff, PlanRegistry
from mempool.planning.shared_arena import ArenaNeighbors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mempool import _core
    from mempool.planning.plan_files import SavedPlans
    from mempool.planning.planned_pattern import PlannedPattern
    from mempool.planning.variants import JointPlanning
    from traces.iterations.pattern import Pattern

    Ranges = set[tuple[int, int]]


class PlanBuilder:
    """Builder and installer of one client's plans.

    A plan is replaced if pinned or other clients' buffers block it, or if it uses more memory than needed.

    Attributes:
        registry: plans known to the core.
        neighbors: offsets of other clients' plans in the shared arena.
        alternates: true if marked iterations may alternate between layouts.
        improvable: keys of plans that may use more memory than needed.
        improves: true if the purpose of the present recording is a smaller plan.
        around_backoff: backoff of planning around pinned ranges.
    """

    def __init__(
        self,
        client: _core.Client,
        device: _core.Device,
        *,
        wait_bytes: int,
        framework: str,
        interrupt: Callable[[], bool],
    ) -> None:
        """Start without plans.

        Args:
            client: client whose iterations are planned.
            device: device whose memory is planned.
            wait_bytes: bytes that a plan must save for each wait of one stream for another.
            framework: name of the framework that uses the memory, or empty.
            interrupt: polled now and then; true stops the work.
        """
        self._client, self._device = client, device
        self._wait_bytes, self._interrupt = wait_bytes, interrupt
        self.registry = PlanRegistry(client, framework=framework)
        self.neighbors = ArenaNeighbors(client)
        self.alternates = self.improves = False
        self.improvable: set[bytes] = set()
        self.around_backoff = ExponentialBackoff()
        self._in_use_before: Ranges | None = None  # ranges in use in the arena some iterations ago

    @cached_property
    def joint(self) -> JointPlanning:
        """Plans that were made jointly."""
        from mempool.planning.variants import JointPlanning  # imported late, as it brings NumPy

        return JointPlanning()

    def load(self, loaded: SavedPlans) -> None:
        """Replay plans from a file.

        Raises:
            ValueError: the core cannot replay a plan.
        """
        self.registry.load(loaded)
        if loaded.variants:
            self.joint.load(loaded.plans, loaded.variants)
        self._retain_free_segments(max(loaded.plans, key=lambda planned: planned.plan.arena_bytes))

    def forget(self) -> None:
        """Drop all plans."""
        self.registry.drop()
        vars(self).pop("joint", None)
        self.improvable, self.around_backoff = set(), ExponentialBackoff()

    def arena_ranges(self) -> Ranges:
        """Return the (begin, end) offsets of all ranges in use in the arena now."""
        return set(self._client.pool.arena_ranges())

    def live_pinned_ranges(self) -> Ranges:
        """Return the (begin, end) offsets of pinned ranges that plans avoid and that are still in use."""
        return set().union(*(known.pinned for known in self.registry)) & self.arena_ranges()

    def plan(self, pattern: Pattern, pinned: Iterable[tuple[int, int]] = ()) -> PlannedPattern | None:
        """Plan a pattern without installing the plan; return None if interrupted.

        Args:
            pattern: pattern of one iteration.
            pinned: (begin, end) offsets of ranges that the plan avoids, in addition to other clients' ranges.
        """
        from mempool.planning.planned_pattern import make_plan

        alternates = self.alternates and self._client.state()["marked"]
        pattern = self.registry.with_warm_up(pattern)
        made = make_plan(pattern, alternates=alternates, **self._search_options(pinned))
        if made is None or self._interrupt():
            return None
        return dataclasses.replace(made, pinned=frozenset(pinned))

    def _search_options(self, pinned: Iterable[tuple[int, int]]) -> dict[str, Any]:
        from traces.intervals import union_of_ranges  # imported late, as it brings NumPy

        return {
            "alignment": self._device.alignment,
            "around": union_of_ranges([*pinned, *self.neighbors.avoided_ranges()]),
            "wait_bytes": self._wait_bytes,
            "interrupt": self._interrupt,
        }

    def install(
        self, planned: PlannedPattern, counts: list[int] | None, *, instead_of: PlannedPattern | None = None
    ) -> bool:
        """Install a plan in the core.

        Args:
            planned: the plan.
            counts: number of allocations of each sequence when the pattern was taken from the recording.
            instead_of: plan to be replaced.

        Returns:
            False if the plan to be replaced no longer exists.
        """
        pattern, allocations = planned.pattern, int(self._client.state()["allocations"])
        longer = any(known.same_sequence(pattern) for known in self.registry)
        if not self.registry.install(planned, counts, instead_of=instead_of):
            return False
        self.joint.plan_installed(allocations, self.neighbors.slot_collisions())
        self.improvable &= {known.key for known in self.registry}
        if pattern.coverage < OPTIONS.min_coverage or longer or instead_of is not None:
            self.improvable.add(planned.key)
        anew = instead_of is None and not longer
        self._client.advance_recording("planned" if anew else "replanned")
        if anew:
            self.around_backoff = ExponentialBackoff()  # around pinned ranges at once
        self._retain_free_segments(planned)
        return True

    def plan_jointly(self, pinned: Iterable[tuple[int, int]] = (), *, if_smaller: bool = False) -> bool:
        """Plan all known variants jointly, so that each may follow any other; return true on success.

        Args:
            pinned: ranges of offsets that the plans avoid, in addition to ranges avoided before.
            if_smaller: install only plans that need clearly less memory or plan clearly more bytes.
        """
        from mempool.planning.planned_pattern import are_clearly_better

        known = self.joint.candidates(self.registry)
        if len(known) < 2:
            return False
        pinned = frozenset(pinned) & self.arena_ranges() | self.live_pinned_ranges()
        iteration = self._client.state()["iterations"]
        found = self.joint.make(known, iteration, **self._search_options(pinned))
        if found is None or self._interrupt():
            return False
        made, variants = found
        if if_smaller and not are_clearly_better(made, known):
            return False
        if not self.fits_memory(max(made, key=lambda planned: planned.plan.arena_bytes)):
            return False
        log.info("%d variants of iterations are planned together", len(made))
        self._client.note_decision("jointly", count=len(made))
        made = [dataclasses.replace(planned, pinned=pinned) for planned in made]
        for before, planned in zip(known, made, strict=True):
            if self.install(planned, None, instead_of=before):
                self.improvable.discard(planned.key)
        self.joint.adopt(made, variants)
        return True

    def fits_memory(self, planned: PlannedPattern) -> bool:
        """Return true if the arena and the present memory outside it fit limit, budget and device."""
        managed = getattr(self._device, "kind", "") == "managed"  # may exceed the device's memory
        stats, total = self._client.pool.stats(), 0 if managed else self._device.memory()[1]
        outside = stats["reserved"]["current"] - stats["arena_bytes"] - stats["segment_free_bytes"]
        most = min(stats["max_reserved_bytes"], stats["budget_bytes"], total or stats["max_reserved_bytes"])
        return bool(planned.plan.arena_bytes + max(outside, 0) <= most)

    def _retain_free_segments(self, planned: PlannedPattern) -> None:
        """Retain some free segments for allocations that miss the plan."""
        if not self._device.slow_return:
            self._client.set_retained_limit(max(OPTIONS.min_cache_bytes, planned.plan.arena_bytes // 8))

    def replan_for_shared_arena(self) -> bool:
        """Plan around other clients' plans that are alive at the same time; return true if replanned.

        After other clients end, plans use the freed ranges if the arena then becomes clearly smaller.
        """
        others = self.neighbors
        collides = others.collides(self.registry)
        if not collides and not others.may_move_closer():
            return False
        from mempool.planning.planned_pattern import are_clearly_better

        others.avoid_others()
        reaches = others.avoided_ranges()
        if self.joint:
            blocked = collides and any(known.is_blocked_by(reaches) for known in self.registry)
            done = self.plan_jointly(if_smaller=not blocked)
            if blocked and not done:
                others.allow_overlap()
            return done
        done = False
        for known in list(self.registry):
            blocked = collides and known.is_blocked_by(reaches)
            planned = self.plan(known.pattern, known.pinned & self.arena_ranges())
            if planned is None or (blocked and not self.fits_memory(planned)):
                others.allow_overlap()
                return done
            if blocked or are_clearly_better([planned], [known]):
                done = self.install(planned, None, instead_of=known) or done
        if done:
            log.info("planning beside others on the same memory")
        return done

    def replan_around_pinned(self) -> bool:
        """Plan around pinned buffers that repeatedly block plans; return true if there is a new plan.

        Live buffers do not move. If the pinned buffers keep changing, the backoff makes replanning rarer.
        """
        blockers = set(self._client.pinned_ranges()) if self.registry else set()
        iteration = self._client.state()["iterations"]
        if not blockers or self.improves or not self.around_backoff.is_allowed(iteration):
            return False
        blocked = [known for known in self.registry if known.is_blocked_by(blockers)]
        now, before = self.arena_ranges(), self._in_use_before
        if before is None:  # a range in use now and some iterations later is pinned
            self._in_use_before = now
            self.around_backoff.allowed_at = iteration + OPTIONS.pinned_iterations
            return False
        self._in_use_before = None
        stays = now & (blockers | before)
        self.around_backoff.record_attempt(iteration)  # counts even if planning fails
        done = False
        if any(map(self.joint.includes, blocked)):
            mine = set().union(*(known.ranges() for known in self.registry))
            done = self.plan_jointly((stays - mine) | (stays & blockers))
            blocked = [
                known for known in self.registry if known in blocked and not self.joint.includes(known)
            ]
        for known in [self.registry.latest] if self.registry.latest in blocked else blocked:
            assert known is not None
            pinned = (stays - known.ranges()) | (stays & blockers)
            planned = self.plan(known.pattern, pinned)
            if planned is None or not self.fits_memory(planned):
                return done
            log.info("planning around %d buffers that stay in the arena", len(pinned))
            self._client.note_decision("around", count=len(pinned))
            self.install(planned, None, instead_of=known)
        return done or bool(blocked)

    def recording_begins(self) -> None:
        """Handle the start of a recording, which serves to improve plans if any can be improved."""
        self.improves = bool(self.improvable) and self._client.state()["replaying"]
        self._in_use_before = self.arena_ranges() if self.improves else None

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
        stays = self.arena_ranges() & (self._in_use_before or set())
        self._in_use_before = None
        known = self.registry.find(pattern)
        if known is None or known.key not in self.improvable or not known.may_be_improved_by(pattern):
            return False
        same, pinned = known.same_sequence(pattern), stays - known.ranges()
        if same and pattern.warm_up is None:
            pattern = dataclasses.replace(pattern, warm_up=known.pattern.warm_up)
        planned = self.plan(pattern, pinned)
        if planned is None or not are_clearly_better([planned], [known]):
            return False
        log.info("planned for less than before")
        self.install(planned, None if same else counts, instead_of=known if same else None)
        if not pinned and pattern.coverage >= OPTIONS.min_coverage:
            self.improvable -= {known.key, planned.key}
        return True

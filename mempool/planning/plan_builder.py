"""Plan builder: makes plans of recurring patterns and installs them in the core.

`mempool.planning.learner` selects the patterns to plan; `mempool.planning.replanner` selects the plans to
replace.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from mempool.logs import log
from mempool.planning.joint_planning import JointPlanning
from mempool.planning.options import OPTIONS
from mempool.planning.registry import PlanMetadata, PlanRegistry
from mempool.planning.shared_arena import ArenaNeighbors, merge_ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mempool import _core
    from mempool.planning.plan_files import SavedPlans
    from mempool.planning.planned_pattern import PlannedPattern
    from traces.iterations.pattern import Pattern


class PlanBuilder:
    """Builder and installer of one client's plans.

    Attributes:
        registry: plans known to the core.
        metadata: possible improvements of each plan.
        joint: plans that were made jointly.
        neighbors: offsets of other clients' plans in the shared arena.
    """

    def __init__(
        self,
        core: _core.Pool,
        client: _core.Client,
        device: _core.Device,
        *,
        wait_bytes: int,
        framework: str,
        interrupt: Callable[[], bool],
    ) -> None:
        """Start without plans.

        Args:
            core: the pool.
            client: client whose iterations are planned.
            device: device whose memory is planned.
            wait_bytes: bytes that a plan must save for each wait of one stream for another.
            framework: name of the framework that uses the memory, or empty.
            interrupt: polled now and then; true stops the work.
        """
        self.alternates = False  # whether marked iterations may alternate between layouts
        self._core, self._client, self._device = core, client, device
        self._wait_bytes, self._interrupt = wait_bytes, interrupt
        self.registry = PlanRegistry(client, framework=framework)
        self.metadata, self.joint = PlanMetadata(), JointPlanning()
        self.neighbors = ArenaNeighbors(client)

    def load(self, loaded: SavedPlans) -> None:
        """Replay plans from a file.

        Raises:
            ValueError: the core cannot replay a plan.
        """
        self.registry.load(loaded)
        self.joint.load(loaded.plans, loaded.variants)
        largest = max(loaded.plans, key=lambda planned: planned.plan.arena_bytes)
        self._retain_free_segments(largest)
        if largest.plan.arena_bytes > OPTIONS.smaller_factor * largest.plan.lower_bound_bytes:
            self.neighbors.assume_stale()

    def forget(self) -> None:
        """Drop all plans."""
        self.registry.drop()
        self.metadata, self.joint = PlanMetadata(), JointPlanning()

    def allocations(self) -> int:
        """Return the number of allocations so far of at least the small-size threshold."""
        return int(self._client.state()["allocations"])

    def iteration(self) -> int:
        """Return the number of iterations so far."""
        return int(self._client.state()["iterations"])

    def arena_ranges(self) -> set[tuple[int, int]]:
        """Return the (begin, end) offsets of all ranges in use in the arena now."""
        return set(self._core.arena_ranges())

    def live_pinned_ranges(self) -> list[tuple[int, int]]:
        """Return the (begin, end) offsets of pinned ranges that plans avoid and that are still in use."""
        around = (self.metadata.avoided_ranges(known.key) for known in self.registry)
        return sorted(set[tuple[int, int]]().union(*around) & self.arena_ranges())

    def plan(self, pattern: Pattern, around: Sequence[tuple[int, int]] = ()) -> PlannedPattern | None:
        """Plan a pattern without installing the plan; return None if interrupted.

        Args:
            pattern: pattern of one iteration.
            around: (begin, end) offsets of ranges that the plan avoids, in addition to other clients' ranges.
        """
        from mempool.planning.planned_pattern import make_plan

        alternates = self.alternates and self._client.state()["marked"]
        planned: PlannedPattern | None = self._interruptible(
            functools.partial(make_plan, alternates=alternates),
            self.registry.with_warm_up(pattern),
            around=around,
        )
        return planned

    def _interruptible(
        self, make: Callable[..., Any], *arguments: object, around: Sequence[tuple[int, int]]
    ) -> Any:
        """Return the result of a planning function; None if interrupted."""
        made = make(
            *arguments,
            alignment=self._device.alignment,
            around=merge_ranges([*around, *self.neighbors.avoided_ranges()]),
            wait_bytes=self._wait_bytes,
            interrupt=self._interrupt,
        )
        return None if self._interrupt() else made

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
        pattern = planned.pattern
        self.joint.plan_installed(self.allocations(), self.neighbors.slot_collisions())
        longer = any(known.same_sequence(pattern) for known in self.registry)
        served = {known.key for known in self.registry if planned.serves(known.pattern)} - {planned.key}
        if not self.registry.install(planned, counts, instead_of=instead_of):
            return False
        self.joint.supersede(planned.key, served)
        self.metadata.keep({known.key for known in self.registry})
        if pattern.coverage < OPTIONS.min_coverage or longer or instead_of is not None:
            self.metadata.improvable.add(planned.key)
        anew = instead_of is None and not longer
        self._client.advance_recording("planned" if anew else "replanned")
        if anew:
            self.metadata.reset_backoff()
        self._retain_free_segments(planned)
        return True

    def plan_jointly(
        self,
        around: Sequence[tuple[int, int]] = (),
        *,
        if_smaller: bool = False,
    ) -> bool:
        """Plan all known variants jointly, so that each may follow any other; return true on success.

        Args:
            around: ranges of offsets that the plans avoid, in addition to ranges avoided before.
            if_smaller: install only plans that need clearly less memory or plan clearly more bytes.
        """
        from mempool.planning.planned_pattern import are_clearly_better
        from mempool.planning.variants import make_joint_plans

        known = self.joint.candidates(self.registry)
        if len(known) < 2:
            return False
        around = sorted((set(around) & self.arena_ranges()).union(self.live_pinned_ranges()))
        made = self.joint.make(
            known,
            self.iteration(),
            lambda *kinds: self._interruptible(make_joint_plans, *kinds, around=around),
        )
        if made is None:
            return False
        largest = max(made, key=lambda planned: planned.plan.arena_bytes)
        if if_smaller and not are_clearly_better(made, known):
            return False
        in_the_way = bool(around or self.neighbors.avoided_ranges())
        if not (self.fits_memory(largest) if in_the_way else self.joint.is_worth_it(made, known)):
            return False
        log.info("%d variants of iterations are planned together", len(made))
        self._client.note_decision("jointly", count=len(made))
        for before, planned in zip(known, made, strict=True):
            if self.install(planned, None, instead_of=before):
                self.metadata.set_avoided_ranges(planned.key, around)
                self.metadata.improvable.discard(planned.key)
        self.joint.adopt(made)
        return True

    def fits_memory(self, planned: PlannedPattern) -> bool:
        """Return true if the arena and the present memory outside it fit limit, budget and device."""
        managed = getattr(self._device, "kind", "") == "managed"  # may exceed the device's memory
        stats, total = self._core.stats(), 0 if managed else self._device.memory()[1]
        outside = stats["reserved"]["current"] - stats["arena_bytes"] - stats["segment_free_bytes"]
        most = min(stats["max_reserved_bytes"], stats["budget_bytes"], total or stats["max_reserved_bytes"])
        return bool(planned.plan.arena_bytes + max(outside, 0) <= most)

    def _retain_free_segments(self, planned: PlannedPattern) -> None:
        """Retain some free segments for allocations that miss the plan."""
        if not self._device.slow_return:
            self._client.set_retained_limit(max(OPTIONS.min_cache_bytes, planned.plan.arena_bytes // 8))

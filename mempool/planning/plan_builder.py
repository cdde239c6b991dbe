"""Plan builder: makes plans of recurring patterns and installs them in the core.

`mempool.planning.learner` selects the patterns to plan; `mempool.planning.replanner` selects the plans to
make again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.logs import log
from mempool.planning.backoff import Counts, Rest
from mempool.planning.joint_planning import Together
from mempool.planning.prospects import Prospects
from mempool.planning.registry import KnownPlans
from mempool.planning.shared_arena import Beside, joined
from mempool.reporting.outcomes import missed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mempool import _core
    from mempool.planning.plan_files import Saved
    from mempool.planning.planned_pattern import Planned
    from traces.iterations.pattern import Pattern


#: Coverage of the peak below which a plan may be improved later.
LEAST_COVERAGE = 0.99
#: Least free memory kept beside an arena, in bytes; an eighth of the arena if that is more.
LEAST_CACHE = 32 << 20


class Making:
    """Plans of one client, and the steps of making and installing them.

    Attributes:
        known: plans in effect, or ready for the next iteration of their pattern.
        prospects: possible improvements of each plan.
        together: plans that were made jointly.
        beside: offsets of other clients' plans in the shared arena.
        rest: schedule of recording.
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
        patient: bool,
    ) -> None:
        """Start without plans.

        Args:
            core: the pool.
            client: client whose iterations are planned.
            device: device whose memory is planned.
            wait_bytes: bytes that a plan must save for each wait of one stream for another.
            framework: name of the framework that uses the memory, or empty.
            interrupt: polled now and then; true stops the work.
            patient: true if the program waits for plans, which then have to be good at once.
        """
        self._core, self._client, self._device = core, client, device
        self._wait_bytes, self._patient = wait_bytes, patient
        self._interrupt = interrupt
        self.known = KnownPlans(client, framework=framework)
        self.prospects, self.together = Prospects(), Together()
        self.beside, self.rest = Beside(client), Rest()

    def load(self, loaded: Saved) -> None:
        """Add plans from a file, which replay already."""
        from mempool.planning.planned_pattern import LESS

        self.known.load(loaded.plans)
        self.together.load(loaded.plans, loaded.kinds)
        largest = max(loaded.plans, key=lambda planned: planned.plan.arena_bytes)
        self._keep_beside(largest)
        if largest.plan.arena_bytes > LESS * largest.plan.lower_bound_bytes:
            self.beside.begin_anew()

    def forget(self) -> None:
        """Drop all plans."""
        self.known.drop()
        self.prospects, self.together = Prospects(), Together()

    def counts(self) -> Counts:
        """Return the counters of allocations and misses."""
        return Counts(self._client.state()["allocations"], missed(self._client.stats()["outcomes"]))

    def iteration(self) -> int:
        """Return the number of iterations so far."""
        return int(self._client.state()["iterations"])

    def arena_ranges(self) -> set[tuple[int, int]]:
        """Return the (begin, end) offsets of all ranges in use in the arena now."""
        return set(self._core.arena_ranges())

    def stays(self) -> list[tuple[int, int]]:
        """Return the (begin, end) offsets of pinned ranges that plans avoid and that are still in use."""
        around = (self.prospects.around(known.key) for known in self.known)
        return sorted(set[tuple[int, int]]().union(*around) & self.arena_ranges())

    def plan(
        self,
        pattern: Pattern,
        around: Sequence[tuple[int, int]] = (),
        *,
        patient: bool | None = None,
        interrupt: Callable[[], bool] | None = None,
    ) -> Planned | None:
        """Plan a pattern without installing the plan; return None if interrupted.

        Args:
            pattern: pattern of one iteration.
            around: (begin, end) offsets of ranges that the plan avoids, besides those of other clients.
            patient: true to search long for a hard pattern; None: as set for this builder.
            interrupt: polled instead of the builder's own; true stops the search.
        """
        from mempool.planning.planned_pattern import make_plan

        how = {} if patient is None else {"patient": patient}
        planned: Planned | None = self._made(make_plan, pattern, around=around, interrupt=interrupt, **how)
        return planned

    def _made(
        self,
        make: Callable[..., Any],
        *what: object,
        around: Sequence[tuple[int, int]] = (),
        interrupt: Callable[[], bool] | None = None,
        **how: object,
    ) -> Any:
        """Return the result of a planning function; None if interrupted."""
        interrupt = interrupt or self._interrupt
        made = make(
            *what,
            alignment=self._device.alignment,
            around=joined([*around, *self.beside.reaches()]),
            wait_bytes=self._wait_bytes,
            interrupt=interrupt,
            **{"patient": self._patient, **how},
        )
        return None if interrupt() else made

    def install(
        self, planned: Planned, counts: list[int] | None, *, instead_of: Planned | None = None
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
        self.together.planned(self.counts(), self.beside.occupied())
        longer = any(known.same_sequence(pattern) for known in self.known)
        served = {known.key for known in self.known if planned.serves(known.pattern)} - {planned.key}
        if not self.known.install(planned, counts, instead_of=instead_of):
            return False
        self.together.take_over(planned.key, served)
        self.prospects.keep({known.key for known in self.known})
        if pattern.coverage < LEAST_COVERAGE or longer or instead_of is not None:
            self.prospects.improvable.add(planned.key)
        anew = instead_of is None and not longer
        self.rest.planned(self.counts(), anew=anew)
        if anew:
            self.prospects.begin_anew()
        self._keep_beside(planned)
        return True

    def may_get_better(self, planned: Planned) -> None:
        """Note whether a plan made in haste deserves a longer search later."""
        if not self._patient and planned.is_hard(wait_bytes=self._wait_bytes):
            self.prospects.hard.add(planned.key)

    def plan_together(
        self,
        around: Sequence[tuple[int, int]] = (),
        *,
        if_smaller: bool = False,
        known: list[Planned] | None = None,
    ) -> bool:
        """Plan all known variants jointly, so that each may follow any other; return true on success.

        Args:
            around: ranges of offsets that the plans avoid, besides those avoided before.
            if_smaller: install only plans that need clearly less memory or leave less unplanned.
            known: plans to use in place of the known ones, with the same sequences.
        """
        from mempool.planning.planned_pattern import are_better
        from mempool.planning.variants import make_plans

        known = self.together.joined(self.known) if known is None else known
        if len(known) < 2:
            return False
        around = sorted((set(around) & self.arena_ranges()).union(self.stays()))
        made = self.together.make(
            known, self.iteration(), lambda *kinds: self._made(make_plans, *kinds, around=around)
        )
        if made is None:
            return False
        largest = max(made, key=lambda planned: planned.plan.arena_bytes)
        instead = [next(k for k in self.known if k.same_sequence(each.pattern)) for each in made]
        if if_smaller and not are_better(made, instead):
            return False
        in_the_way = bool(around or self.beside.reaches())
        if not (self.can_be_had(largest) if in_the_way else self.together.are_worth_it(made, known)):
            return False
        log.info("%d kinds of iterations are planned together", len(made))
        for before, planned in zip(instead, made, strict=True):
            if self.install(planned, None, instead_of=before):
                self.prospects.made_around(planned.key, around)
                self.prospects.improvable.discard(planned.key)
        self.together.are(made)
        return True

    def can_be_had(self, planned: Planned) -> bool:
        """Return true if the arena and the present use outside it fit limit, budget and device."""
        managed = getattr(self._device, "kind", "") == "managed"  # managed memory may exceed the device's
        stats, total = self._core.stats(), 0 if managed else self._device.memory()[1]
        outside = stats["reserved"]["current"] - stats["arena_bytes"] - stats["segment_free_bytes"]
        most = min(stats["max_reserved_bytes"], stats["budget_bytes"], total or stats["max_reserved_bytes"])
        return bool(planned.plan.arena_bytes + max(outside, 0) <= most)

    def _keep_beside(self, planned: Planned) -> None:
        """Keep some free segments for allocations that do not follow the plan."""
        if not self._device.slow_return:
            self._client.set_retained_limit(max(LEAST_CACHE, planned.plan.arena_bytes // 8))

"""Makes plans of what recurs, and hands them to the core.

What to plan is for `mempool.learner`; what to plan again, for `mempool.replanning`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.beside import Beside, joined
from mempool.known_plans import KnownPlans
from mempool.logs import log
from mempool.prospects import Prospects
from mempool.report import missed
from mempool.rest import Counts, Rest
from mempool.together import Together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mempool import _core
    from mempool.plan_files import Saved
    from mempool.planned import Planned
    from traces.pattern import Pattern


#: A plan that covers less of the peak may be improved one day.
LEAST_COVERAGE = 0.99
#: Free memory kept beside an arena: this or an eighth of it.
LEAST_CACHE = 32 << 20


class Making:
    """One client's plans, and how they are made.

    Attributes:
        known: those that are in effect, or will be when what they are of comes.
        prospects: what may still become of them.
        together: those of them that were made together.
        beside: where the plans of other clients on the same memory lie.
        rest: when recording ends, and when it begins again.
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
        ask: Callable[..., Any],
        patient: bool,
    ) -> None:
        """Nothing is known yet.

        Args:
            core: the pool.
            client: whose iterations.
            device: whose memory it is that is planned.
            wait_bytes: what a plan must save for each wait of one stream for another.
            framework: whose memory it is, or empty.
            interrupt: asked now and then whether to stop.
            ask: calls a function with these arguments, and an `interrupt`, here or elsewhere.
            patient: whether the program waits for plans, so that they had better be good at once.
        """
        self._core, self._client, self._device = core, client, device
        self._wait_bytes, self._patient = wait_bytes, patient
        self._interrupt, self._ask = interrupt, ask
        self.known = KnownPlans(client, framework=framework)
        self.prospects, self.together = Prospects(), Together()
        self.beside, self.rest = Beside(client), Rest()

    def load(self, loaded: Saved) -> None:
        """Know plans from a file, which replay already."""
        from mempool.planned import LESS

        self.known.load(loaded.plans)
        self.together.load(loaded.plans, loaded.kinds)
        largest = max(loaded.plans, key=lambda planned: planned.plan.arena_bytes)
        self._keep_beside(largest)
        if largest.plan.arena_bytes > LESS * largest.plan.lower_bound_bytes:
            self.beside.begin_anew()

    def forget(self) -> None:
        """Know no plan any more."""
        self.known.drop()
        self.prospects, self.together = Prospects(), Together()

    def counts(self) -> Counts:
        """What was allocated and missed by now."""
        return Counts(self._client.state()["allocations"], missed(self._client.stats()["outcomes"]))

    def iteration(self) -> int:
        """How many iterations there were."""
        return int(self._client.state()["iterations"])

    def arena_ranges(self) -> set[tuple[int, int]]:
        """(begin, end) offsets of all that is in use in the arena now."""
        return set(self._core.arena_ranges())

    def stays(self) -> list[tuple[int, int]]:
        """(begin, end) offsets of what plans were made around, and is still in the way of any."""
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
        """A plan of a pattern, not yet handed to the core; None: it was interrupted.

        Args:
            pattern: of an iteration.
            around: (begin, end) offsets that it keeps out of, beside those of other clients.
            patient: whether to search for long if it is hard; None: as the program is.
            interrupt: whether to stop, asked instead of the usual.
        """
        from mempool.planned import make_plan

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
        """What a function of planning makes; None: interrupted."""
        interrupt = interrupt or self._interrupt
        made = self._ask(
            make,
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
        """Hand a plan to the core.

        Args:
            planned: the plan.
            counts: by sequence, the allocations it had made when the pattern was taken from the recording.
            instead_of: the plan that it replaces.

        Returns:
            False: there is no plan any more that it was to replace.
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
        """Of a plan made in haste: a longer search may be worth it one day."""
        if not self._patient and planned.is_hard(wait_bytes=self._wait_bytes):
            self.prospects.hard.add(planned.key)

    def plan_together(
        self,
        around: Sequence[tuple[int, int]] = (),
        *,
        if_smaller: bool = False,
        known: list[Planned] | None = None,
    ) -> bool:
        """Plan all kinds that are known anew, so that each may follow any other; True if that gave plans.

        Args:
            around: ranges of offsets that they keep out of, beside those that they kept out of before.
            if_smaller: only if they need clearly less than before, or leave less unplanned.
            known: these instead, with the same sequences as what is known.
        """
        from mempool.kinds import make_plans
        from mempool.planned import are_better

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
        """Whether the arena, and what is in use outside it now, is within limit, budget and device."""
        managed = getattr(self._device, "kind", "") == "managed"  # which may be more than the device has
        stats, total = self._core.stats(), 0 if managed else self._device.memory()[1]
        outside = stats["reserved"]["current"] - stats["arena_bytes"] - stats["segment_free_bytes"]
        most = min(stats["max_reserved_bytes"], stats["budget_bytes"], total or stats["max_reserved_bytes"])
        return bool(planned.plan.arena_bytes + max(outside, 0) <= most)

    def _keep_beside(self, planned: Planned) -> None:
        """Keep some free segments for what does not follow the plan."""
        if not self._device.slow_return:
            self._client.set_retained_limit(max(LEAST_CACHE, planned.plan.arena_bytes // 8))

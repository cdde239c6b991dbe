"""Registry of the plans that the core replays: their metadata, and how often the program follows them.

The core owns the plans and decides which plan to evict.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mempool import _core
from mempool.logs import log
from mempool.planning.options import OPTIONS
from mempool.settings import made_with

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mempool.planning.plan_files import SavedPlans
    from mempool.planning.planned_pattern import PlannedPattern
    from traces.iterations.pattern import Pattern


NEVER = 1 << 62
STRAYS = ("size_mismatch", "slot_occupied", "past_end", "desynchronized")
#: Largest number of plans that the core keeps.
MOST_KNOWN: int = _core.MOST_PATTERNS


class PlanRegistry:
    """Plans of one client, the latest first.

    Attributes:
        latest: the plan made last, or None.
        made: number of plans made so far.
        installed_at_iteration: number of iterations when the latest plan was installed.
    """

    def __init__(self, client: _core.Client, *, framework: str) -> None:
        """Start without plans; `framework`: name of the framework that uses the memory, or empty."""
        self._client, self._framework = client, framework
        self._plans: dict[int, PlannedPattern] = {}  # by the id in the core, the latest first
        self._loaded: PlannedPattern | None = None
        self._are_remembered = False  # true: the pool chose the loaded plans
        self._warned_foreign = False
        self._dropped_at = 0, 0  # hits and strays at the last drop of all plans
        self._installed_at = 0, 0  # hits and strays at the last installation
        self.latest: PlannedPattern | None = None
        self.made = self.installed_at_iteration = 0

    def __iter__(self) -> Iterator[PlannedPattern]:
        return iter(list(self._plans.values()))

    def __len__(self) -> int:
        return len(self._plans)

    def load(self, loaded: SavedPlans) -> None:
        """Replay plans from a file, the latest first.

        Raises:
            ValueError: the core cannot replay a plan, for example because of the device's alignment.
        """
        first, *others = loaded.in_warm_up_order()
        ids = {
            planned.key: self._client.install(planned.native(), planned.pattern.iterations_seen)
            for planned in others
        }
        ids[first.key] = self._client.load(first.native_warm_up(), first.native(), unsure=True)
        self.latest = self._loaded = loaded.plans[0]
        self._plans = {ids[planned.key]: planned for planned in loaded.plans}
        self._are_remembered = self._warned_foreign = loaded.remembered
        self.refresh()

    def refresh(self) -> None:
        """Drop the plans that the core has evicted or superseded."""
        known = {number for number, _ in self._client.patterns()}
        if not self._plans.keys() <= known:
            self._plans = {number: planned for number, planned in self._plans.items() if number in known}
        if all(planned is not self.latest for planned in self._plans.values()):
            self.latest = next(iter(self._plans.values()), None)

    def worth_saving(self) -> list[PlannedPattern]:
        """Return the plans that served a fair share of the allocations, or all plans if none did.

        This excludes unused plans from a file, and plans of repetitions that are not iterations, such as the
        construction of a model's layers.
        """
        iterations = dict(self._client.patterns())
        served = {number: iterations[number] * len(known.buffers) for number, known in self._plans.items()}
        least = OPTIONS.saved_share * max(served.values(), default=0)
        return [known for number, known in self._plans.items() if served[number] >= least]

    def install(
        self, planned: PlannedPattern, counts: list[int] | None, *, instead_of: PlannedPattern | None
    ) -> bool:
        """Install a plan in the core, as a new plan or instead of another plan of the same sequence.

        Returns:
            False, with nothing installed, if the core has dropped the plan to be replaced.
        """
        self.warn_if_foreign(at_last=True)
        pattern = planned.pattern
        instead = instead_of is not None
        if not instead:
            self._client.note_decision("period", count=len(pattern.buffers), times=pattern.iterations)
        number = self._client.install(planned.native(counts), pattern.iterations_seen, instead=instead)
        if number == 0:
            self.refresh()
            return False
        if instead_of is None:
            self.latest = planned
            self._plans = {number: planned, **self._plans}
        else:
            self.latest = planned if self.latest is instead_of else self.latest
            self._plans = {
                number if known is instead_of else old: planned if known is instead_of else known
                for old, known in self._plans.items()
            }
        self.refresh()
        self.made += 1
        self.installed_at_iteration = self._client.state()["iterations"]
        self._installed_at = self._followed()
        log.info("planned %d buffers into %d bytes", len(pattern.buffers), planned.plan.arena_bytes)
        return True

    def drop(self) -> None:
        """Drop all plans."""
        self._client.drop_patterns()
        self.latest, self._plans = None, {}
        self._dropped_at = self._followed()

    def has_envelopes(self) -> bool:
        """Return true if any plan is for an upper-bound pattern (iterations that differ in sizes only)."""
        return any(known.pattern.least is not None for known in self)

    def are_detected(self) -> bool:
        """Return true if there are plans, none of them from a file."""
        return self._loaded is None and self.latest is not None

    def find(self, pattern: Pattern) -> PlannedPattern | None:
        """Return the plan of this pattern, or of a rotation of this pattern; None if unknown."""
        same = [known for known in self if known.same_sequence(pattern)]
        return next(iter(same or [known for known in self if known.is_rotation_of(pattern)]), None)

    def with_warm_up(self, pattern: Pattern) -> Pattern:
        """Return an envelope; add the warm-up of a known envelope of the same order if missing."""
        if pattern.least is None or pattern.warm_up is not None:
            return pattern
        warm_ups = (
            known.pattern.warm_up
            for known in self
            if known.pattern.least is not None and known.same_order(pattern)
        )
        return dataclasses.replace(pattern, warm_up=next(warm_ups, None))

    def are_useless(self) -> bool:
        """Return true if the plans cost time and memory, but the program hardly ever followed them.

        Plans with a long past use are kept, since the program may return to their patterns. Plans of a plan
        file, and later plans, are kept too, since the program may not have begun the planned iterations.
        Remembered plans are kept until this run makes a plan.
        """
        if self._loaded_plans_stay() or self.latest is None:
            return False
        hits, strays = self._followed_since(self._dropped_at)
        return strays >= OPTIONS.max_strays and hits < strays * OPTIONS.min_hit_rate

    def are_followed(self) -> bool:
        """Return true without plans, or if hits since the last plan at least equal strays."""
        hits, strays = self._followed_since(self._installed_at)
        return self.latest is None or hits >= strays

    def is_profitable(self) -> bool:
        """Return true if nearly all allocations since the last plan were hits."""
        hits, strays = self._followed_since(self._installed_at)
        return strays <= OPTIONS.paying_miss_rate * (hits + strays)

    def allocations_until_verdict(self) -> int:
        """Return the number of allocations until plans can count as useless, or a loaded plan as foreign."""
        if self._loaded_plans_stay():
            hits, strays = self._followed()
            return NEVER if self._warned_foreign else self._least_to_judge() - hits - strays
        if self.latest is None:
            return NEVER
        hits, strays = self._followed_since(self._dropped_at)
        return max(OPTIONS.max_strays, int(hits / OPTIONS.min_hit_rate)) - strays

    def warn_if_foreign(self, *, at_last: bool = False) -> None:
        """Warn once if the program has not followed the loaded plan although it should have.

        Args:
            at_last: true to judge after fewer allocations, before another plan is installed.
        """
        if self._loaded is None or self._warned_foreign:
            return
        hits, strays = self._followed()
        if hits + strays < (OPTIONS.min_allocations_to_judge if at_last else self._least_to_judge()):
            return
        self._warned_foreign = True
        if hits < strays:
            now = made_with(self._framework)
            known = self._loaded.made_with and self._loaded.made_with != now
            made = f" (made with {self._loaded.made_with}, this is {now})" if known else ""
            log.warning(
                "hardly anything follows the plan so far%s: is it another program's or model's?", made
            )

    def are_given(self) -> bool:
        """Return true if the user gave the plans, in a file."""
        return self._loaded is not None and not self._are_remembered

    def _loaded_plans_stay(self) -> bool:
        """Return true if there are loaded plans that are kept even without hits."""
        return self._loaded is not None and not (self._are_remembered and self.made)

    def _least_to_judge(self) -> int:
        assert self._loaded is not None
        return max(OPTIONS.min_allocations_to_judge, 2 * len(self._loaded.buffers))

    def _followed(self) -> tuple[int, int]:
        """Return the total numbers of hits, and of strays: allocations that departed from a plan."""
        outcomes = self._client.stats()["outcomes"]
        return outcomes["hit"], sum(outcomes[kind] for kind in STRAYS)

    def _followed_since(self, then: tuple[int, int]) -> tuple[int, int]:
        hits, strays = self._followed()
        return hits - then[0], strays - then[1]


class ExponentialBackoff:
    """Exponential backoff, in iterations, of a repeated action.

    Attributes:
        allowed_at: first iteration in which the action is allowed again.
    """

    def __init__(self, longest: int = NEVER) -> None:
        """Allow the action at once; no pause is longer than `longest` iterations."""
        self.allowed_at, self._gap, self._longest = 0, 2, longest

    def is_allowed(self, iteration: int) -> bool:
        """Return true if the action is allowed in this iteration."""
        return iteration >= self.allowed_at

    def record_attempt(self, iteration: int) -> None:
        """Record an attempt in this iteration, and double the pause."""
        self._gap = min(2 * self._gap, self._longest)
        self.allowed_at = iteration + self._gap

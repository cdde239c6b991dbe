"""Replanner: makes plans again where pinned or foreign buffers block them, or where less memory suffices."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from mempool.logs import log
from mempool.planning.plan_builder import LEAST_COVERAGE

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool import _core
    from mempool.planning.plan_builder import Making
    from traces.iterations.pattern import Pattern


#: Least lifetime, in iterations, of a buffer that plans avoid although it does not block any plan yet.
LEAST_STAY = 2


class Replanning:
    """Replanner of one client.

    Attributes:
        improves: true if the present recording serves to find a smaller plan.
    """

    def __init__(self, client: _core.Client, making: Making) -> None:
        """Start without observations."""
        self._client, self._making = client, making
        self.improves = False
        self._seen_alive: set[tuple[int, int]] | None = None  # ranges in use in the arena some iterations ago

    def beside(self) -> bool:
        """Plan around other clients' plans that are alive at the same time; return true if replanned.

        When the other clients are gone, plans move closer again if that makes the arena clearly smaller.
        """
        making, others = self._making, self._making.beside
        collides = others.collides(making.known)
        if not collides and not others.may_come_closer():
            return False
        from mempool.planning.planned_pattern import are_better

        others.begin()
        reaches = others.reaches()
        if making.together:
            blocked = collides and any(known.is_blocked_by(reaches) for known in making.known)
            done = making.plan_together(if_smaller=not blocked)
            if blocked and not done:
                others.give_up()
            return done
        done = False
        for known in list(making.known):
            blocked = collides and known.is_blocked_by(reaches)
            stays = making.prospects.around(known.key) & making.arena_ranges()
            planned = making.plan(known.pattern, sorted(stays))
            if planned is None or (blocked and not making.can_be_had(planned)):
                others.give_up()
                return done
            if blocked or are_better([planned], [known]):
                done = making.install(planned, None, instead_of=known) or done
        if done:
            log.info("planning beside others on the same memory")
        return done

    def around(self) -> bool:
        """Plan around kept buffers that repeatedly block plans; return true if there is a new plan.

        Nothing alive is moved. Where kept buffers keep changing, the backoff makes replanning ever rarer.
        """
        making = self._making
        blockers = self._client.pinned_ranges() if making.known else []
        iteration, when = making.iteration(), making.prospects.blocked
        if not blockers or self.improves or not when.may_be_done(iteration):
            return False
        blocked = [known for known in making.known if known.is_blocked_by(blockers)]
        stays = self._what_stays(set(blockers), iteration)
        if stays is None:
            return False
        when.is_done(iteration)  # counts even if planning fails
        done, together = False, making.together
        if any(map(together.have, blocked)):
            mine = set[tuple[int, int]]().union(*(known.ranges() for known in making.known))
            done = making.plan_together(sorted((stays - mine) | stays.intersection(blockers)))
            blocked = [known for known in making.known if known in blocked and not together.have(known)]
        for known in [making.known.latest] if making.known.latest in blocked else blocked:
            assert known is not None
            around = sorted(stays - known.ranges() | stays.intersection(blockers))
            planned = making.plan(known.pattern, around)
            if planned is None or not making.can_be_had(planned):
                return done
            log.info("planning around %d buffers that stay in the arena", len(around))
            if making.install(planned, None, instead_of=known):
                making.prospects.made_around(planned.key, around)
        return done or bool(blocked)

    def _what_stays(self, blockers: set[tuple[int, int]], iteration: int) -> set[tuple[int, int]] | None:
        """Return the arena ranges to avoid: the blockers, and ranges that may block the next plan.

        A range that was in use some iterations ago and is in use now is pinned. Returns None while no earlier
        observation exists.
        """
        now = self._making.arena_ranges()
        if self._seen_alive is None:
            self._seen_alive = now
            self._making.prospects.blocked.not_before(iteration + LEAST_STAY)
            return None
        seen, self._seen_alive = self._seen_alive, None
        return now & (blockers | seen)

    def may_polish(self) -> bool:
        """Return true if the program has long followed a plan that was made in haste."""
        making, latest, state = self._making, self._making.known.latest, self._client.state()
        return (
            latest is not None
            and latest.key in making.prospects.hard
            and not making.prospects.around(latest.key)
            and not making.together.have(latest)
            and state["replaying"]
            and not state["recording"]
            and not making.beside.reaches()
        )

    def polish(self, interrupt: Callable[[], bool]) -> bool:
        """Search longer for a plan that was made in haste; return true if that gave a better one.

        Done once for each plan, and only after the program has followed the plan for long: the search takes a
        second of processor time, and several seconds of the clock while the program is busy. If the program
        leaves the plan meanwhile, the search stops; it starts anew when the program has followed the plan for
        longer than before.

        Args:
            interrupt: polled now and then; true stops the search.
        """
        making, known = self._making, self._making.known.latest
        assert known is not None
        hard, improvable = making.prospects.hard, making.prospects.improvable
        hard.remove(known.key)
        planned = making.plan(known.pattern, patient=True, interrupt=interrupt)
        if planned is None:
            hard.add(known.key)
            return False
        if planned.plan.arena_bytes >= known.plan.arena_bytes:
            return False
        log.info("a longer search made a smaller arena")
        was = known.key in improvable
        done = making.install(planned, None, instead_of=known)
        if not was:
            improvable.discard(planned.key)
        return done

    def may_improve(self) -> bool:
        """Return true if some plan may use more memory than needed, now or later."""
        return bool(self._making.prospects.improvable or self._making.together)

    def recording_begins(self) -> None:
        """Note that recording begins; if plans can be improved, use the recording for that."""
        self.improves = self.may_improve() and self._client.state()["replaying"]
        self._seen_alive = self._making.arena_ranges() if self.improves else None

    def improve(self, patterns: list[Pattern], settled: list[Pattern], counts: list[int]) -> bool:
        """Make plans again that use more memory than needed by now; return true if that gave better plans.

        Causes are lifetimes that were longer for a while, pinned buffers, and buffers that piled up.

        Args:
            patterns: recurring patterns, the most frequent first.
            settled: patterns whose frees are all known.
            counts: number of allocations of each sequence so far.
        """
        return self._improve(patterns[0], counts) or self._improve_together(settled)

    def _improve(self, pattern: Pattern, counts: list[int]) -> bool:
        from mempool.planning.planned_pattern import are_better

        self.improves = False
        making, improvable = self._making, self._making.prospects.improvable
        stays = making.arena_ranges() & (self._seen_alive or set())
        self._seen_alive = None
        known = making.known.alike(pattern)
        if known is None or known.key not in improvable or not known.may_be_improved_by(pattern):
            return False
        same = known.same_sequence(pattern)
        around = sorted(stays - known.ranges())
        if same and pattern.warm_up is None:
            pattern = dataclasses.replace(pattern, warm_up=known.pattern.warm_up)
        planned = making.plan(pattern, around)
        if planned is None or not are_better([planned], [known]):
            return False
        log.info("planned for less than before")
        how: dict[str, Any] = {"counts": None, "instead_of": known} if same else {"counts": counts}
        making.install(planned, **how)
        if not around and pattern.coverage >= LEAST_COVERAGE:
            improvable -= {known.key, planned.key}
        return True

    def _improve_together(self, settled: list[Pattern]) -> bool:
        """Improve the joint plans of the recorded variants; the others are dropped from the joint plan."""
        making, together = self._making, self._making.together
        shown = {pattern.key: pattern for pattern in settled if pattern.reach}
        known = [known for known in making.known if together.have(known) and known.key in shown]
        if len(known) < 2:
            return False
        instead = [each.shown_as(shown[each.key]) for each in known]
        with together.anew(shown.values()) as confirm:
            if making.plan_together(if_smaller=True, known=instead):
                log.info("planned for less than before")
                confirm()
                return True
        return False

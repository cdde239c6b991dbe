"""What to plan: looks at a client's recording, makes plans of what recurs, hands them to the core.

It knows when a look may show something new, and when what is planned should be planned again. When it may run
and what that costs is for `mempool.planner`; which plans there are, for `mempool.known_plans`.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from mempool.beside import Beside, joined
from mempool.known_plans import MOST_KNOWN, KnownPlans
from mempool.prospects import Prospects
from mempool.report import missed
from mempool.rest import NEVER, SPOILT, Counts, Due, Rarely, Rest
from mempool.together import Together

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mempool import _core
    from mempool.plan_files import Saved
    from mempool.planned import Planned
    from traces.pattern import Pattern

log = logging.getLogger("mempool")

#: Looks in vain after which a device without pages keeps some free segments: none at first, since nobody
#: knows what will stay and hold them.
LOOKS_BEFORE_CACHING = 6
#: With marks, how many iterations to wait for the frees of buffers that outlive theirs.
PATIENT_ITERATIONS = 5
#: Events that must have come before another look at iterations that are known.
LEAST_NEWS = 16
#: Of iterations with one size of many, less than this share is not worth a plan.
SELDOM = 1 / 8
#: So many times the allocations of all kinds tell what follows what, and how long buffers live then.
ENOUGH_OF_EACH = 8
#: Of a plan of epochs, its steps hit; where more miss, it is by chance that they look like them.
MOST_ASTRAY = 1 / 64
#: A longer warm-up, in allocations, is not learned: looking at it again and again would cost too much.
MOST_WARM_UP = 1 << 13
#: Iterations that a buffer is alive at least before it is planned around though it is not in the way yet.
LEAST_STAY = 2
#: A plan that covers less of the peak may be improved one day.
LEAST_COVERAGE = 0.99
_LEAST_CACHE = 32 << 20


class Learner:
    """One client's, whose plans are in ``known``."""

    def __init__(
        self,
        core: _core.Pool,
        client: _core.Client,
        device: _core.Device,
        *,
        small_bytes: int,
        wait_bytes: int,
        framework: str,
        interrupt: Callable[[], bool],
        ask: Callable[..., Any],
        patient: bool,
    ) -> None:
        """Nothing is known yet.

        Args:
            core: the pool.
            client: whose recording.
            device: whose memory it is that is planned.
            small_bytes: requests up to this size are not planned.
            wait_bytes: what a plan must save for each wait of one stream for another.
            framework: whose memory it is, or empty.
            interrupt: asked now and then whether to stop.
            ask: calls a function with these arguments, and an `interrupt`, here or elsewhere.
            patient: whether the program waits for plans, so that they had better be good at once.
        """
        self._core, self._client = core, client
        self._device, self._small_bytes, self._wait_bytes = device, small_bytes, wait_bytes
        self._interrupt = interrupt
        self._ask, self._patient = ask, patient
        self.known = KnownPlans(client, framework=framework)
        self._vain = 0
        self._rest = Rest()
        self._dropped = 0
        self._misses_seen = -1
        self._around = Rarely()  # to plan again around what stays
        self._seen_alive: set[tuple[int, int]] | None = None  # ranges of the arena, some iterations ago
        self._prospects = Prospects()
        self._improving = False  # that is what the recording is for
        self._recorded_at = 0  # iteration when recording began
        self._marked = False  # there was a mark when something was recorded
        self._together = Together()
        self._beside = Beside(client)

    def begin(self, loaded: Saved | None = None) -> None:
        """Begin recording; loaded plans replay already."""
        if loaded is not None:
            self.known.load(loaded.plans)
            self._misses_seen = self._misses()  # while all follows them there is nothing to learn
            self._together.load(loaded.plans, loaded.kinds)
            largest = max(loaded.plans, key=lambda planned: planned.plan.arena_bytes)
            self._keep_beside(largest)
            from mempool.planned import LESS

            if largest.plan.arena_bytes > LESS * largest.plan.lower_bound_bytes:
                self._beside.begin_anew()
        self._record()

    def saved(self) -> Saved | None:
        """What is known, for `begin` in another process; None: nothing is."""
        from mempool.plan_files import Saved

        plans = list(self.known)
        return Saved(plans, self._together.kinds(plans)) if plans else None

    def begin_anew(self) -> None:
        """Forget all plans and record again."""
        self._forget()
        self._client.set_recording(False)  # what was recorded says nothing of what is to come
        self._record()

    def _forget(self) -> None:
        self.known.drop()
        self._prospects = Prospects()
        self._together = Together()

    def _record(self) -> None:
        self._client.set_recording(True)
        self._rest.recorded_from(self._counts())
        self._recorded_at = self._client.state()["iterations"]

    def _keep_beside(self, planned: Planned) -> None:
        """Keep some free segments for what does not follow the plan."""
        if not self._device.slow_return:
            self._client.set_retained_limit(max(_LEAST_CACHE, planned.plan.arena_bytes // 8))

    def look(self) -> bool:
        """Look at the recording once; True if a plan was handed to the core."""
        self.known.tell_of_a_stranger()
        self.desert_if_useless()
        done = self.plan_beside() or self.plan_around() or (self.may_learn() and self.learn())
        return done or (self.may_polish() and self.polish())

    def may_learn(self) -> bool:
        """Whether the recording may hold anything new; it ends when all has long followed the plan."""
        state = self._client.state()
        if not state["recording"]:
            self.resume_if_changed()
            return False
        misses = self._misses()
        if state["replaying"] and state["settled"] and not self._improving:
            self._settle()
            return False
        if state["replaying"] and misses == self._misses_seen and not self._improving:
            # All has followed the plan since the last look: there is nothing to learn.
            self._client.check_again_after(max(64, 2 * state["allocations"] // max(state["iterations"], 1)))
            return False
        return True

    def learn(self) -> bool:
        """Look at what recurs; True if that gave a plan."""
        state = self._client.state()
        self._misses_seen = self._misses()
        self._perhaps_marked(state)
        patterns, counts = self._patterns()
        if not patterns:
            self._nothing_found()
        if self._improving and patterns and self._shows_enough(patterns[0], state):
            if self._improve(patterns[0], counts) or self._improve_together(patterns):
                return True
            if self._rest.share_of_misses(self._counts()) == 0:
                self._settle()
                return False
        if (fresh := self._fresh(patterns, state)) is not None:
            return self._plan(fresh, counts)
        if self._is_together_due(patterns, state) and self._plan_together():
            return True
        for pattern in patterns:
            if longer := self._longer_lived(pattern, state):
                return self._plan(longer, counts)
        self._nothing_new(patterns, state)
        return False

    def _perhaps_marked(self, state: dict[str, Any]) -> None:
        """With the first mark, forget what was found without it: parts of iterations, or several in a row."""
        if state["marked"] and not self._marked:
            self._marked = True
            if self.known.are_found():
                self._forget()

    def _fresh(self, patterns: list[Pattern], state: dict[str, Any]) -> Pattern | None:
        """The first that is worth planning, unless as many come all the time as can be known."""
        come = sum(any(known.same_sequence(pattern) for pattern in patterns) for known in self.known)
        if state["marked"] and come >= MOST_KNOWN:
            return None
        return next((pattern for pattern in patterns if self._is_worth_planning(pattern, state)), None)

    def _nothing_new(self, patterns: list[Pattern], state: dict[str, Any]) -> None:
        """When to look again."""
        if state["events_dropped"] > self._dropped:
            # The ring has wrapped and shows nothing new: stop paying for it, and try again much later.
            self._dropped = state["events_dropped"]
            if not self.known and self._client.grow_recording():
                return
            self._client.set_recording(False)
            self._rest.since_vain(self._counts(), replaying=state["replaying"])
        elif patterns:
            # What is new shows in a part of what was seen, not in the next few events.
            kept = state["events_kept"]
            known = state["replaying"] and not patterns[0].unresolved
            self._client.check_again_after(
                max(LEAST_NEWS, 2 * len(patterns[0].buffers), kept // 8 if known else 0)
            )

    def _settle(self) -> None:
        """All follows the plan: recording ends, for good unless a plan may be improved one day."""
        self._client.set_recording(False)
        self._rest.since_settled(self._counts(), improvable=self._may_be_improved())

    def rest(self) -> None:
        """Something failed that may not fail again: no more of it for long."""
        self._client.set_recording(False)
        self._rest.since_failure(self._counts())

    def _counts(self) -> Counts:
        return Counts(self._client.state()["allocations"], self._misses())

    def _occupied(self) -> int:
        """How often something else was alive where an allocation should have been, ever."""
        return int(self._client.stats()["outcomes"]["occupied"])

    def _misses(self) -> int:
        """How often an allocation found no plan or did not follow it, ever."""
        return missed(self._client.stats()["outcomes"])

    def _patterns(self) -> tuple[list[Pattern], list[int]]:
        """What recurs in the recording, and how many allocations each sequence had made by then."""
        from mempool.recording import recurring

        found = self._client.look()
        if found is None:
            return [], []
        begin, allocations = found
        wanted = {} if begin <= MOST_WARM_UP else {"allocations": allocations - begin}
        packed, streams, counts, whole = self._client.recording(**wanted)
        patterns: list[Pattern] = self._ask(
            recurring,
            packed,
            streams,
            alignment=self._device.alignment,
            small_bytes=self._small_bytes,
            whole_recording=whole,
        )
        return patterns, counts

    def _longer_lived(self, pattern: Pattern, state: dict[str, Any]) -> Pattern | None:
        """What is planned, with the longer lifetimes of this pattern; None: it is not, or they are none."""
        known = next((known for known in self.known if known.same_sequence(pattern)), None)
        if known is None or self._together.have(known) or self._is_young(pattern):
            return None  # how long buffers of several kinds live is a matter of what follows
        longer = self._prospects.longer(known.key)
        if not known.outlived_by(pattern) or not longer.may_be_done(state["iterations"]):
            return None
        longer.is_done(state["iterations"])
        return known.extended(pattern)

    def _is_worth_planning(self, pattern: Pattern, state: dict[str, Any]) -> bool:
        """Whether to plan this pattern, which is not planned yet."""
        if self._is_young(pattern) or any(known.same_sequence(pattern) for known in self.known):
            return False
        cannot_be_had = state["refusal"] == "memory" and not state["replaying"]  # what is known: it is no use
        spoilt = state["spoilt"] >= SPOILT or cannot_be_had
        astray = self._rest.share_of_misses(self._counts()) > MOST_ASTRAY
        for known in self.known:
            if not spoilt and known.rotates_to(pattern):
                return False
            if known.is_close_to(pattern) and not self._deserves_its_own(pattern, known, state, helps=spoilt):
                return False
            if not spoilt and not astray and self._is_completed(known, state) and known.repeats(pattern):
                return False
        return True

    def _deserves_its_own(
        self, pattern: Pattern, known: Planned, state: dict[str, Any], *, helps: bool
    ) -> bool:
        """Whether to plan this, though it is close to what is known: it comes often, and that may help."""
        # Of one length are iterations with one size of many, as data are; of several, sequences of words.
        marked = bool(state["marked"])
        one_length = not marked or len(pattern.buffers) == len(known.buffers)
        share = SELDOM if one_length else 1 / MOST_KNOWN
        return pattern.iterations >= share * pattern.iterations_seen and (helps or marked)

    def _is_young(self, pattern: Pattern) -> bool:
        """Whether the frees of buffers that outlive their iteration may still come."""
        return pattern.unresolved > 0 and pattern.iterations < PATIENT_ITERATIONS

    def _is_completed(self, known: Planned, state: dict[str, Any]) -> bool:
        """Whether iterations end, or a plan as long as this has had no time yet since recording began."""
        passed = state["allocations"] - self._rest.began
        return bool(state["iterations"] > self._recorded_at or passed < 2 * len(known.buffers))

    def _plan(self, pattern: Pattern, counts: list[int]) -> bool:
        planned = self._make(pattern)
        if planned is None:
            return False
        self._install(planned, counts)
        if not self._patient and planned.is_hard(wait_bytes=self._wait_bytes):
            self._prospects.hard.add(planned.key)
        self._vain = 0
        self._client.check_again_after(max(64, 4 * len(pattern.buffers)))
        return True

    def _is_together_due(self, patterns: list[Pattern], state: dict[str, Any]) -> bool:
        """Whether what one kind of iteration leaves alive is in the way of others' plans."""
        if not state["replaying"] or not self._together.collide(self._counts(), self._occupied()):
            return False
        if self.shares() and not self._together:
            return False  # others' buffers may be what is in the way
        seen = [pattern for pattern in patterns if not self._is_young(pattern)]
        return self._together.are_due(list(self.known), seen, state["iterations"])

    def _plan_together(
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

        known = self._together.joined(self.known) if known is None else known
        if len(known) < 2:
            return False
        stays = set(around).union(*(self._prospects.around(planned.key) for planned in known))
        around = sorted(stays.intersection(self._core.arena_ranges()))
        made = self._together.make(
            known,
            self._client.state()["iterations"],
            lambda *kinds: self._made(make_plans, *kinds, around=around),
        )
        if made is None:
            return False
        largest = max(made, key=lambda planned: planned.plan.arena_bytes)
        instead = [next(k for k in self.known if k.same_sequence(each.pattern)) for each in made]
        if if_smaller and not are_better(made, instead):
            return False
        in_the_way = bool(around or self._beside.reaches())
        if not (self._can_be_had(largest) if in_the_way else self._together.are_worth_it(made, known)):
            return False
        log.info("%d kinds of iterations are planned together", len(made))
        for before, planned in zip(instead, made, strict=True):
            if self._install(planned, None, instead_of=before):
                self._prospects.made_around(planned.key, around)
                self._prospects.improvable.discard(planned.key)
        self._together.are(made)
        return True

    def may_polish(self) -> bool:
        """Whether all has long followed a plan that was made in haste."""
        latest, state = self.known.latest, self._client.state()
        return (
            latest is not None
            and latest.key in self._prospects.hard
            and not self._prospects.around(latest.key)
            and not self._together.have(latest)
            and state["replaying"]
            and not state["recording"]
            and not self._beside.reaches()
        )

    def polish(self) -> bool:
        """Search longer for a plan that was made in haste; True if that gave a better one.

        Once for each plan, and only when the program has followed it for long: it is a second of work, and
        several of the clock where the program is busy. A program that goes off the plan meanwhile is looked
        at first, and the search begins anew when it has followed the plan for longer than before.
        """
        known = self.known.latest
        assert known is not None
        hard, improvable = self._prospects.hard, self._prospects.improvable
        hard.remove(known.key)
        planned = self._make(
            known.pattern, patient=True, interrupt=lambda: self._interrupt() or self._has_changed()
        )
        if planned is None:
            hard.add(known.key)
            self.resume_if_changed()
            return False
        if planned.plan.arena_bytes >= known.plan.arena_bytes:
            return False
        log.info("a longer search made a smaller arena")
        was = known.key in improvable
        done = self._install(planned, None, instead_of=known)
        if not was:
            improvable.discard(planned.key)
        return done

    def _make(
        self,
        pattern: Pattern,
        around: Sequence[tuple[int, int]] = (),
        *,
        patient: bool | None = None,
        interrupt: Callable[[], bool] | None = None,
    ) -> Planned | None:
        """None: interrupted."""
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
            around=joined([*around, *self._beside.reaches()]),
            wait_bytes=self._wait_bytes,
            interrupt=interrupt,
            **{"patient": self._patient, **how},
        )
        return None if interrupt() else made

    def _install(
        self, planned: Planned, counts: list[int] | None, *, instead_of: Planned | None = None
    ) -> bool:
        """False: there is no plan any more that it was to replace."""
        pattern = planned.pattern
        self._together.planned(self._counts(), self._occupied())
        longer = any(known.same_sequence(pattern) for known in self.known)
        if not self.known.install(planned, counts, instead_of=instead_of):
            return False
        self._prospects.keep({known.key for known in self.known})
        if pattern.coverage < LEAST_COVERAGE or longer or instead_of is not None:
            self._prospects.improvable.add(planned.key)
        anew = instead_of is None and not longer
        self._rest.planned(self._counts(), anew=anew)
        if anew:
            self._around = Rarely()
        self._keep_beside(planned)
        return True

    def shares(self) -> bool:
        """Whether other clients use this memory, or have when plans were made."""
        return self._beside.layouts is not None or self._beside.others_changes() > 0

    def plan_beside(self) -> bool:
        """Plan again beside the plans of others that are alive at the same time; True if it is done.

        What lies beside theirs comes closer when they are gone, where that makes the arena clearly smaller.
        """
        collides = self._beside.collides(self.known)
        if not collides and not self._beside.may_come_closer():
            return False
        from mempool.planned import are_better

        self._beside.begin()
        others = self._beside.reaches()
        if self._together:
            blocked = collides and any(known.is_blocked_by(others) for known in self.known)
            done = self._plan_together(if_smaller=not blocked)
            if blocked and not done:
                self._beside.give_up()
            return done
        done = False
        for known in list(self.known):
            blocked = collides and known.is_blocked_by(others)
            stays = self._prospects.around(known.key).intersection(self._core.arena_ranges())
            planned = self._make(known.pattern, sorted(stays))
            if planned is None or (blocked and not self._can_be_had(planned)):
                self._beside.give_up()
                return done
            if blocked or are_better([planned], [known]):
                done = self._install(planned, None, instead_of=known) or done
        if done:
            log.info("planning beside others on the same memory")
        return done

    def _can_be_had(self, planned: Planned) -> bool:
        """Whether the arena, and what is in use outside it now, is within limit, budget and device."""
        managed = getattr(self._device, "kind", "") == "managed"  # which may be more than the device has
        stats, total = self._core.stats(), 0 if managed else self._device.memory()[1]
        outside = stats["reserved"]["current"] - stats["arena_bytes"] - stats["segment_free_bytes"]
        most = min(stats["max_reserved_bytes"], stats["budget_bytes"], total or stats["max_reserved_bytes"])
        return bool(planned.plan.arena_bytes + max(outside, 0) <= most)

    def plan_around(self) -> bool:
        """Plan again where something kept lies in the way, time and again; True if there is a new plan.

        Nothing alive is moved. Where it does not end, as with buffers that are kept for a while only, it is
        done ever more rarely.
        """
        blockers = self._client.blockers() if self.known else []
        iteration = self._client.state()["iterations"]
        if not blockers or self._improving or not self._around.may_be_done(iteration):
            return False
        blocked = [known for known in self.known if known.is_blocked_by(blockers)]
        stays = self._what_stays(set(blockers), iteration)
        if stays is None:
            return False
        self._around.is_done(iteration)  # also where that fails
        done = False
        if any(map(self._together.have, blocked)):
            mine = set[tuple[int, int]]().union(*(known.ranges() for known in self.known))
            done = self._plan_together(sorted((stays - mine) | stays.intersection(blockers)))
            blocked = [known for known in self.known if known in blocked and not self._together.have(known)]
        for known in [self.known.latest] if self.known.latest in blocked else blocked:
            assert known is not None
            around = sorted(stays - known.ranges() | stays.intersection(blockers))
            planned = self._make(known.pattern, around)
            if planned is None or not self._can_be_had(planned):
                return done
            log.info("planning around %d buffers that stay in the arena", len(around))
            if self._install(planned, None, instead_of=known):
                self._prospects.made_around(planned.key, around)
        return done or bool(blocked)

    def _may_be_improved(self) -> bool:
        """Whether some plan may be for more than is needed, now or one day."""
        return bool(self._prospects.improvable or self._together)

    def _shows_enough(self, pattern: Pattern, state: dict[str, Any]) -> bool:
        """Whether the recording tells how long buffers live; of several kinds, in whatever follows them."""
        if self._is_young(pattern):
            return False
        together = sum(len(known.buffers) for known in self.known if self._together.have(known))
        return bool(state["allocations"] - self._rest.began >= ENOUGH_OF_EACH * together)

    def _improve_together(self, patterns: list[Pattern]) -> bool:
        """The same of all kinds that are planned together and in the recording; the others no longer are."""
        shown = {
            pattern.key: pattern for pattern in patterns if pattern.reach and not self._is_young(pattern)
        }
        known = [known for known in self.known if self._together.have(known) and known.key in shown]
        if len(known) < 2:
            return False
        with self._together.anew(shown.values()) as confirm:
            if self._plan_together(if_smaller=True, known=[each.shown_as(shown[each.key]) for each in known]):
                log.info("planned for less than before")
                confirm()
                return True
        return False

    def _improve(self, pattern: Pattern, counts: list[int]) -> bool:
        """Plan again what was planned for more than there is by now; True if that gave a better plan.

        Lifetimes that were longer for a while, buffers that stayed in the way, or that piled up.
        """
        from mempool.planned import are_better

        self._improving = False
        stays = set(self._core.arena_ranges()) & (self._seen_alive or set())
        self._seen_alive = None
        known = self.known.alike(pattern)
        if (
            known is None
            or known.key not in self._prospects.improvable
            or not known.may_be_improved_by(pattern)
        ):
            return False
        same = known.same_sequence(pattern)
        around = sorted(stays - known.ranges())
        if same and pattern.warm_up is None:
            pattern = dataclasses.replace(pattern, warm_up=known.pattern.warm_up)
        planned = self._make(pattern, around)
        if planned is None or not are_better([planned], [known]):
            return False
        log.info("planned for less than before")
        if same:
            self._install(planned, None, instead_of=known)
        else:
            self._install(planned, counts)
        if not around and pattern.coverage >= LEAST_COVERAGE:
            self._prospects.improvable -= {known.key, planned.key}
        return True

    def _what_stays(self, blockers: set[tuple[int, int]], iteration: int) -> set[tuple[int, int]] | None:
        """Ranges of the arena that are in the way, and all others that stay, lest they be in the next plan's.

        Who was there some iterations ago and is there now stays; None: it is not yet known who was.
        """
        now = set(self._core.arena_ranges())
        if self._seen_alive is None:
            self._seen_alive = now
            self._around.not_before(iteration + LEAST_STAY)
            return None
        seen, self._seen_alive = self._seen_alive, None
        return now & (blockers | seen)

    def looks_may_be_in_vain(self) -> bool:
        """Whether nothing hangs on how many looks at the recording find that nothing recurs."""
        return self._device.page > 0 or self._device.slow_return

    def _nothing_found(self) -> None:
        self._vain += 1
        for_nothing = self.known.latest is None and not self.looks_may_be_in_vain()
        if self._vain == LOOKS_BEFORE_CACHING and for_nothing:
            kept = max(_LEAST_CACHE, self._core.stats()["reserved"]["peak"] // 8)
            self._client.set_retained_limit(kept)

    def due(self) -> Due:
        """When something is to be done at the earliest, whatever recurs."""
        state, now = self._client.state(), self._counts()
        rest = Due(NEVER, NEVER, NEVER)
        if not state["recording"]:
            rest = self._rest.due(now, replaying=state["replaying"])
        in_allocations = max(1, min(rest.allocations - now.allocations, self.known.judged_in()))
        allocations, misses = now.allocations + in_allocations, max(rest.misses, now.misses + 1)
        return Due(allocations, misses, rest.spoilt, self._around.at, self._beside.layouts)

    def resume_if_changed(self) -> None:
        """Record again when the pattern has changed for good, or, without one, after a long pause."""
        state = self._client.state()
        if state["recording"]:
            return
        if self._has_changed():
            log.info("recording again")
            self._improving = self._may_be_improved() and state["replaying"]
            self._seen_alive = set(self._core.arena_ranges()) if self._improving else None
            self._record()

    def _has_changed(self) -> bool:
        """Whether to record again, if nothing is recorded."""
        state = self._client.state()
        return self._rest.is_over(self._counts(), replaying=state["replaying"], spoilt=state["spoilt"])

    def desert_if_useless(self) -> None:
        """Drop the plans if they are of no use."""
        if self.known.are_useless():
            log.info("nothing follows the plan")
            self._forget()
            self._rest.since_deserted(self._counts(), recording=self._client.state()["recording"])

"""What to plan: looks at a client's recording for what recurs and is worth a plan.

It knows when a look may show something new. When it may run and what that costs is for `mempool.planner`; how
plans are made, for `mempool.making`; what is planned again, for `mempool.replanning`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.known_plans import MOST_KNOWN
from mempool.logs import log
from mempool.making import LEAST_CACHE
from mempool.replanning import Replanning
from mempool.rest import NEVER, SPOILT, Due, Rarely

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool import _core
    from mempool.making import Making
    from mempool.plan_files import Saved
    from mempool.planned import Planned
    from traces.pattern import Pattern


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
#: Iterations after which an envelope is made larger again at the latest, where it is outgrown.
LONGEST_WAIT = 32
#: Where marks are expected, allocations without one after which they are expected no longer, and events
#: from one look for the first to the next.
MOST_UNMARKED, EVENTS_UNMARKED = 1 << 16, 256
#: A longer warm-up, in allocations, is not learned: looking at it again and again would cost too much.
MOST_WARM_UP = 1 << 13


class Learner:
    """One client's.

    Attributes:
        known: its plans.
        making: makes them.
        again: plans those of them that are to be planned again.
    """

    def __init__(
        self,
        core: _core.Pool,
        client: _core.Client,
        device: _core.Device,
        making: Making,
        *,
        small_bytes: int,
        interrupt: Callable[[], bool],
        ask: Callable[..., Any],
    ) -> None:
        """Nothing is known yet.

        Args:
            core: the pool.
            client: whose recording.
            device: whose memory it is that is planned.
            making: makes the plans.
            small_bytes: requests up to this size are not planned.
            interrupt: asked now and then whether to stop.
            ask: calls a function with these arguments, and an `interrupt`, here or elsewhere.
        """
        self._core, self._client = core, client
        self._device, self._small_bytes = device, small_bytes
        self._interrupt, self._ask = interrupt, ask
        self.making, self.known, self._rest = making, making.known, making.rest
        self.again = Replanning(client, making)
        self._vain = 0
        self._dropped = 0
        self._misses_seen = -1
        self._over_at = NEVER  # the iteration in which the one that missed lately is over
        self._wider: dict[int, Rarely] = {}  # by its length, when an envelope may be made larger
        self._recorded_at = 0  # iteration when recording began
        self._marked = False  # there was a mark when something was recorded
        self._expects_marks = False

    def expect_marks(self) -> None:
        """Marks are to come: what repeats before the first is a part of an iteration, and gets no plan."""
        self._expects_marks = True

    def begin(self, loaded: Saved | None = None) -> None:
        """Begin recording; loaded plans replay already."""
        if loaded is not None:
            self.making.load(loaded)
            self._misses_seen = self._misses()  # while all follows them there is nothing to learn
        self._record()

    def saved(self) -> Saved | None:
        """What is known, for `begin` in another process; None: nothing is."""
        from mempool.plan_files import Saved

        plans = list(self.known)
        return Saved(plans, self.making.together.kinds(plans)) if plans else None

    def begin_anew(self) -> None:
        """Forget all plans and record again."""
        self.making.forget()
        self._client.set_recording(False)  # what was recorded says nothing of what is to come
        self._record()

    def _record(self) -> None:
        self._client.set_recording(True)
        self._rest.recorded_from(self.making.counts())
        self._recorded_at = self._client.state()["iterations"]

    def look(self) -> bool:
        """Look at the recording once; True if a plan was handed to the core."""
        self.known.tell_of_a_stranger()
        self.desert_if_useless()
        done = self.again.beside() or self.again.around() or (self.may_learn() and self.learn())
        return done or (self.again.may_polish() and self.polish())

    def may_learn(self) -> bool:
        """Whether the recording may hold anything new; it ends when all has long followed the plan."""
        state = self._client.state()
        if not state["recording"]:
            self.resume_if_changed()
            return False
        if self._expects_marks and not state["marked"] and state["allocations"] < MOST_UNMARKED:
            self._client.check_again_after(EVENTS_UNMARKED)
            return False
        misses = self._misses()
        if state["replaying"] and state["settled"] and not self.again.improves:
            self._settle()
            return False
        seen = misses == self._misses_seen and state["iterations"] < self._over_at
        if state["replaying"] and seen and not self.again.improves:
            # All has followed the plan since the last look: there is nothing to learn.
            self._client.check_again_after(max(64, 2 * state["allocations"] // max(state["iterations"], 1)))
            return False
        return True

    def learn(self) -> bool:
        """Look at what recurs; True if that gave a plan."""
        state = self._client.state()
        missed, self._misses_seen = self._misses_seen, self._misses()
        # One iteration is enough to make an envelope larger, but it has to be whole.
        grew = missed < self._misses_seen and self.known.have_envelopes()
        self._over_at = state["iterations"] + 1 if grew else NEVER
        self._perhaps_marked(state)
        patterns, counts = self._patterns()
        if not patterns:
            self._nothing_found()
        if self.again.improves and patterns and self._shows_enough(patterns[0], state):
            if self.again.improve(patterns, self._not_young(patterns), counts):
                return True
            if self._rest.share_of_misses(self.making.counts()) == 0:
                self._settle()
                return False
        if (fresh := self._fresh(patterns, state)) is not None:
            return self._plan(fresh, counts)
        if self._is_together_due(patterns, state) and self.making.plan_together():
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
                self.making.forget()

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
            self._rest.since_vain(self.making.counts(), replaying=state["replaying"])
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
        self._rest.since_settled(self.making.counts(), improvable=self.again.may_improve())

    def rest(self) -> None:
        """Something failed that may not fail again: no more of it for long."""
        self._client.set_recording(False)
        self._rest.since_failure(self.making.counts())

    def _misses(self) -> int:
        """How often an allocation found no plan or did not follow it, ever."""
        return self.making.counts().misses

    def _patterns(self) -> tuple[list[Pattern], list[int]]:
        """What recurs in the recording, and how many allocations each sequence had made by then."""
        from mempool import enveloped
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
            enveloped=enveloped.lengths(self.known),
        )
        return enveloped.widened(patterns, self.known), counts

    def _longer_lived(self, pattern: Pattern, state: dict[str, Any]) -> Pattern | None:
        """What is planned, with the longer lifetimes of this pattern; None: it is not, or they are none."""
        known = next((known for known in self.known if known.same_sequence(pattern)), None)
        if known is None or self.making.together.have(known) or self._is_young(pattern):
            return None  # how long buffers of several kinds live is a matter of what follows
        longer = self.making.prospects.longer(known.key)
        if not known.outlived_by(pattern) or not longer.may_be_done(state["iterations"]):
            return None
        longer.is_done(state["iterations"])
        return known.extended(pattern)

    def _is_worth_planning(self, pattern: Pattern, state: dict[str, Any]) -> bool:
        """Whether to plan this pattern, which is not planned yet."""
        if self._is_young(pattern) or any(known.serves(pattern) for known in self.known):
            return False
        if pattern.least is not None:
            return self._is_worth_enveloping(pattern, state)
        cannot_be_had = state["refusal"] == "memory" and not state["replaying"]  # what is known: it is no use
        spoilt = state["spoilt"] >= SPOILT or cannot_be_had
        astray = self._rest.share_of_misses(self.making.counts()) > MOST_ASTRAY
        for known in self.known:
            if not spoilt and known.rotates_to(pattern):
                return False
            if known.is_close_to(pattern) and not self._deserves_its_own(pattern, known, state, helps=spoilt):
                return False
            if not spoilt and not astray and self._is_completed(known, state) and known.repeats(pattern):
                return False
        return True

    def _is_worth_enveloping(self, pattern: Pattern, state: dict[str, Any]) -> bool:
        """Whether to plan this envelope: not for kinds whose own plans are followed, nor again and again."""
        alike = [known for known in self.known if known.same_order(pattern)]
        of_kinds = any(known.pattern.least is None for known in alike)
        if of_kinds and self._rest.share_of_misses(self.making.counts()) <= MOST_ASTRAY:
            return False
        if not any(known.pattern.least is not None for known in alike):
            return True
        again = self._wider.setdefault(len(pattern.buffers), Rarely(LONGEST_WAIT))
        if not again.may_be_done(state["iterations"]):
            self._over_at = again.at
            return False
        again.is_done(state["iterations"])
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

    def _not_young(self, patterns: list[Pattern]) -> list[Pattern]:
        """Those whose frees are all known."""
        return [pattern for pattern in patterns if not self._is_young(pattern)]

    def _is_completed(self, known: Planned, state: dict[str, Any]) -> bool:
        """Whether iterations end, or a plan as long as this has had no time yet since recording began."""
        passed = state["allocations"] - self._rest.began
        return bool(state["iterations"] > self._recorded_at or passed < 2 * len(known.buffers))

    def _plan(self, pattern: Pattern, counts: list[int]) -> bool:
        stays = self.making.stays()
        planned = self.making.plan(pattern, stays)
        if planned is not None and stays and not self.making.can_be_had(planned):
            stays = []
            planned = self.making.plan(pattern)
        if planned is None:
            return False
        self.making.install(planned, counts)
        self.making.prospects.made_around(planned.key, stays)
        self.making.may_get_better(planned)
        self._vain = 0
        self._client.check_again_after(max(64, 4 * len(pattern.buffers)))
        return True

    def _is_together_due(self, patterns: list[Pattern], state: dict[str, Any]) -> bool:
        """Whether what one kind of iteration leaves alive is in the way of others' plans."""
        making, together = self.making, self.making.together
        if not state["replaying"] or not together.collide(making.counts(), making.beside.occupied()):
            return False
        if making.beside.shares() and not together:
            return False  # others' buffers may be what is in the way
        return together.are_due(list(self.known), self._not_young(patterns), state["iterations"])

    def _shows_enough(self, pattern: Pattern, state: dict[str, Any]) -> bool:
        """Whether the recording tells how long buffers live; of several kinds, in whatever follows them."""
        if self._is_young(pattern):
            return False
        together = sum(len(known.buffers) for known in self.known if self.making.together.have(known))
        return bool(state["allocations"] - self._rest.began >= ENOUGH_OF_EACH * together)

    def polish(self) -> bool:
        """Search longer for a plan that was made in haste, unless the program goes off it meanwhile."""
        done = self.again.polish(lambda: self._interrupt() or self._has_changed())
        if not done:
            self.resume_if_changed()
        return done

    def looks_may_be_in_vain(self) -> bool:
        """Whether nothing hangs on how many looks at the recording find that nothing recurs."""
        return self._device.page > 0 or self._device.slow_return

    def _nothing_found(self) -> None:
        self._vain += 1
        for_nothing = self.known.latest is None and not self.looks_may_be_in_vain()
        if self._vain == LOOKS_BEFORE_CACHING and for_nothing:
            kept = max(LEAST_CACHE, self._core.stats()["reserved"]["peak"] // 8)
            self._client.set_retained_limit(kept)

    def due(self) -> Due:
        """When something is to be done at the earliest, whatever recurs."""
        state, now = self._client.state(), self.making.counts()
        rest = Due(NEVER, NEVER, NEVER)
        if not state["recording"]:
            rest = self._rest.due(now, replaying=state["replaying"])
        in_allocations = max(1, min(rest.allocations - now.allocations, self.known.judged_in()))
        allocations, misses = now.allocations + in_allocations, max(rest.misses, now.misses + 1)
        making = self.making
        return Due(allocations, misses, rest.spoilt, making.prospects.blocked.at, making.beside.layouts)

    def resume_if_changed(self) -> None:
        """Record again when the pattern has changed for good, or, without one, after a long pause."""
        if not self._client.state()["recording"] and self._has_changed():
            log.info("recording again")
            self.again.recording_begins()
            self._record()

    def _has_changed(self) -> bool:
        """Whether to record again, if nothing is recorded."""
        state = self._client.state()
        return self._rest.is_over(self.making.counts(), replaying=state["replaying"], spoilt=state["spoilt"])

    def desert_if_useless(self) -> None:
        """Drop the plans if they are of no use."""
        if self.known.are_useless():
            log.info("nothing follows the plan")
            self.making.forget()
            self._rest.since_deserted(self.making.counts(), recording=self._client.state()["recording"])

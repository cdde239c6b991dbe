"""Learner: finds recurring patterns in a client's recording and selects those worth a plan.

The learner decides when the recording may contain new patterns. `mempool.planning.planner_thread` limits when
the learner runs and its cost; `mempool.planning.plan_builder` makes and replaces plans.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from mempool import _core
from mempool.logs import log
from mempool.planning.options import OPTIONS
from mempool.planning.registry import MOST_KNOWN, NEVER, ExponentialBackoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.planning.plan_builder import PlanBuilder
    from mempool.planning.plan_files import SavedPlans
    from mempool.planning.planned_pattern import PlannedPattern
    from traces.iterations.pattern import Pattern


class Learner:
    """Learner of one client.

    Attributes:
        registry: plans of the client.
        builder: builder of plans.
        withdrawal_reason: reason why the last unprofitable plan was withdrawn; empty without one.
    """

    def __init__(
        self,
        client: _core.Client,
        device: _core.Device,
        builder: PlanBuilder,
        *,
        small_bytes: int,
        interrupt: Callable[[], bool],
    ) -> None:
        """Start without plans and without a recording.

        Args:
            client: client whose recording is analysed.
            device: device whose memory is planned.
            builder: builder of plans.
            small_bytes: requests up to this size are not planned.
            interrupt: polled now and then; true stops the work.
        """
        self._client, self._device, self._small_bytes = client, device, small_bytes
        self._interrupt = interrupt
        self.builder, self.registry = builder, builder.registry
        self.withdrawal_reason = ""
        self._dropped = 0
        self._misses_seen = -1
        self._iteration_over_at = NEVER  # number of the iteration after the latest misses
        # backoff of planning longer lifetimes, by key of the pattern
        self._extend_backoff = defaultdict[bytes, ExponentialBackoff](ExponentialBackoff)
        # backoff of enlarging an upper-bound pattern, by length of the pattern
        self._enlarge_backoff = defaultdict[int, ExponentialBackoff](
            lambda: ExponentialBackoff(OPTIONS.max_enlarge_pause)
        )
        self._marked = False  # true if an earlier look found a mark
        self._unmarked_until = 0  # number of allocations before which a mark is expected
        self._paid_at_iteration = 0  # latest iteration in which the plans were profitable
        self._timed_plans = 0  # number of plans at the last comparison of iteration times

    def require_step_marks(self, until: int = OPTIONS.max_unmarked) -> None:
        """Expect a mark before allocation number `until`; earlier repetitions are parts of an iteration."""
        self._unmarked_until = max(self._unmarked_until, until)

    def begin(self, loaded: SavedPlans | None = None) -> None:
        """Start recording, and start replaying loaded plans."""
        if loaded is not None:
            self.builder.load(loaded)
            self._misses_seen = self._client.misses()  # following the loaded plans needs no learning
        self._client.advance_recording("begin")

    def saved_plans(self) -> SavedPlans | None:
        """Return the known plans, for `begin` in another process; None if no plan is known."""
        from mempool.planning.plan_files import SavedPlans

        self.registry.refresh()
        plans = self.registry.worth_saving()
        return SavedPlans(plans, self.builder.joint.variants(plans)) if plans else None

    def reset_plans(self) -> None:
        """Forget all plans and record again."""
        self.builder.forget()
        self._client.advance_recording("end")  # the old recording says nothing about later iterations
        self._client.advance_recording("begin")

    def may_learn(self) -> bool:
        """Return true if the recording may contain a new pattern; stop recording in steady state."""
        state = self._client.state()
        if not state["recording"]:
            self.resume_if_changed()
            return False
        if not state["marked"] and state["allocations"] < self._unmarked_until:
            self._client.check_again_after(OPTIONS.unmarked_events)
            return False
        misses = self._client.misses()
        # An iteration larger than all before enlarges an envelope, and may come at any time.
        settled = state["settled"] and not self.registry.has_envelopes()
        if state["replaying"] and settled and not self.builder.improves:
            self._settle()
            return False
        seen = misses == self._misses_seen and state["iterations"] < self._iteration_over_at
        if state["replaying"] and seen and not self.builder.improves:
            # No misses since the last look: nothing to learn.
            self._client.check_again_after(max(64, 2 * state["allocations"] // max(state["iterations"], 1)))
            return False
        return True

    def learn(self) -> bool:
        """Search the recording for patterns; return true if a plan was installed."""
        try:
            return self._learn()
        finally:
            self._client.ignore_time()

    def _learn(self) -> bool:
        state = self._client.state()
        missed, self._misses_seen = self._misses_seen, self._client.misses()
        # One complete iteration is enough to enlarge an upper-bound pattern.
        grew = missed < self._misses_seen and self.registry.has_envelopes()
        self._iteration_over_at = state["iterations"] + 1 if grew else NEVER
        self._drop_unmarked_plans(state)
        patterns, counts = self._patterns()
        if self.builder.improves and patterns and not self._is_young(patterns[0]):
            if self.builder.improve(patterns[0], counts):
                return True
            if self._client.state()["miss_rate"] == 0:
                self._settle()
                return False
        if (fresh := self._first_unplanned(patterns, state)) is not None:
            return self._plan(fresh, counts)
        if self._is_joint_planning_due(patterns, state) and self.builder.plan_jointly():
            return True
        for pattern in patterns:
            if longer := self._longer_lived(pattern, state):
                return self._plan(longer, counts)
        self._schedule_next_look(patterns, state)
        return False

    def _drop_unmarked_plans(self, state: dict[str, Any]) -> None:
        """Drop, at the first mark, the plans found without marks: for parts or for runs of iterations."""
        if state["marked"] and not self._marked:
            self._marked = True
            if self.registry.are_detected():
                self.builder.forget()

    def _first_unplanned(self, patterns: list[Pattern], state: dict[str, Any]) -> Pattern | None:
        """Return the first pattern worth planning; None if MOST_KNOWN variants with plans recur already."""
        come = sum(any(known.same_sequence(pattern) for pattern in patterns) for known in self.registry)
        if state["marked"] and come >= MOST_KNOWN:
            return None
        return next((pattern for pattern in patterns if self._is_worth_planning(pattern, state)), None)

    def _schedule_next_look(self, patterns: list[Pattern], state: dict[str, Any]) -> None:
        """Schedule the next look after one without new patterns."""
        # An iteration larger than all before enlarges an envelope, and may come at any time.
        grows = state["replaying"] and self.registry.has_envelopes()
        if state["events_dropped"] > self._dropped and not grows:
            # The ring has wrapped without a new pattern: stop recording, and try again much later.
            self._dropped = state["events_dropped"]
            if not self.registry and self._client.grow_recording():
                return
            self._client.advance_recording("fruitless")
        elif patterns:
            # A new pattern takes a good part of the recorded length, not a few events.
            kept = state["events_kept"]
            known = state["replaying"] and not patterns[0].unresolved
            self._client.check_again_after(
                max(OPTIONS.min_new_events, 2 * len(patterns[0].buffers), kept // 8 if known else 0)
            )

    def _settle(self) -> None:
        """Stop recording, since all requests follow the plan; restart only if the plan may be improved."""
        self._client.advance_recording("improvable" if self.builder.improvable else "settled")

    def _patterns(self) -> tuple[list[Pattern], list[int]]:
        """Return the recurring patterns, and the present number of allocations of each sequence."""
        from mempool.planning import variants
        from mempool.recording.events import EventConverter
        from traces.iterations.pattern import find_patterns

        found = self._client.find_recurrence()
        if found is None:
            return [], []
        begin, allocations = found
        relevant = allocations if begin <= OPTIONS.max_warm_up else allocations - begin
        recent = min(relevant, self._most_examined())
        wanted = {"allocations": recent} if recent < allocations else {}
        packed, streams, counts, whole = self._client.recording(**wanted)
        if self._interrupt():
            return [], counts
        trace = EventConverter(self._device.alignment).convert_brief(packed, streams)
        del packed  # as large as the trace
        patterns = find_patterns(
            trace,
            small_bytes=self._small_bytes,
            whole_recording=whole,
            enveloped=variants.envelope_lengths(self.registry),
        )
        return variants.widen_envelopes(patterns, self.registry), counts

    def _most_examined(self) -> int:
        """Return the largest number of allocations to examine, the latest: all until plans are known."""
        longest = max((len(known.buffers) for known in self.registry), default=NEVER)
        gauges = self._client.pool.stats()["reserved"], self._client.stats()["live"]
        permitted = int(max(gauge["peak"] for gauge in gauges) * OPTIONS.look_share) // OPTIONS.look_bytes
        return max(OPTIONS.examined_allocations, OPTIONS.examined_iterations * longest, permitted)

    def _longer_lived(self, pattern: Pattern, state: dict[str, Any]) -> Pattern | None:
        """Return the known pattern extended by longer lifetimes of `pattern`.

        None if unknown or not longer.
        """
        known = next((known for known in self.registry if known.same_sequence(pattern)), None)
        if known is None or self.builder.joint.includes(known) or self._is_young(pattern):
            return None  # lifetimes of jointly planned variants depend on the followers
        longer = self._extend_backoff[known.key]
        if not known.underestimates_lifetimes_of(pattern) or not longer.is_allowed(state["iterations"]):
            return None
        longer.record_attempt(state["iterations"])
        return known.extend_lifetimes(pattern)

    def _is_worth_planning(self, pattern: Pattern, state: dict[str, Any]) -> bool:
        """Return true if this pattern, which has no plan yet, deserves one."""
        if self._is_young(pattern) or any(known.serves(pattern) for known in self.registry):
            return False
        if any(known.serves_shortened(pattern) for known in self.registry if known.pattern.least is not None):
            return False
        if pattern.least is not None:
            return self._is_worth_enveloping(pattern, state)
        cannot_be_had = state["refusal"] == "memory" and not state["replaying"]  # no arena for the known plan
        spoilt = state["miss_score"] >= _core.CHANGED_SCORE or cannot_be_had
        for known in self.registry:
            if not spoilt and known.is_rotation_of(pattern):
                return False
            if known.is_close_to(pattern) and not self._deserves_its_own(pattern, known, state, helps=spoilt):
                return False
        return True

    def _is_worth_enveloping(self, pattern: Pattern, state: dict[str, Any]) -> bool:
        """Return true if this upper-bound pattern deserves a plan.

        An upper-bound pattern gets no plan while the plans of its variants are followed. An enlarged
        upper-bound pattern gets a plan only as often as the backoff permits.
        """
        alike = [known for known in self.registry if known.same_order(pattern)]
        of_kinds = any(known.pattern.least is None for known in alike)
        if of_kinds and state["miss_rate"] <= OPTIONS.astray_rate:
            return False
        if not any(known.pattern.least is not None for known in alike):
            return True
        again = self._enlarge_backoff[len(pattern.buffers)]
        if not again.is_allowed(state["iterations"]):
            self._iteration_over_at = again.allowed_at
            return False
        again.record_attempt(state["iterations"])
        return True

    def _deserves_its_own(
        self, pattern: Pattern, known: PlannedPattern, state: dict[str, Any], *, helps: bool
    ) -> bool:
        """Return true if this pattern deserves a separate plan although a similar pattern has one."""
        # The pattern must recur often enough. A similar pattern of equal length differs by a data-dependent
        # size; similar patterns of several lengths come from inputs of several lengths, such as sentences.
        marked = bool(state["marked"])
        one_length = not marked or len(pattern.buffers) == len(known.buffers)
        share = OPTIONS.rare_variant if one_length else 1 / MOST_KNOWN
        return pattern.iterations >= share * pattern.iterations_seen and (helps or marked)

    def _is_young(self, pattern: Pattern) -> bool:
        """Return true if buffers that outlive their iteration may have unrecorded frees."""
        return pattern.unresolved > 0 and pattern.iterations < OPTIONS.patient_iterations

    def _plan(self, pattern: Pattern, counts: list[int]) -> bool:
        pinned = self.builder.live_pinned_ranges()
        planned = self.builder.plan(pattern, pinned)
        if planned is not None and pinned and not self.builder.fits_memory(planned):
            planned = self.builder.plan(pattern)
        if planned is None:
            return False
        self.builder.install(planned, counts)
        self._client.check_again_after(max(64, 4 * len(pattern.buffers)))
        return True

    def _is_joint_planning_due(self, patterns: list[Pattern], state: dict[str, Any]) -> bool:
        """Return true if buffers that a variant leaves alive block plans of other variants."""
        neighbors, together = self.builder.neighbors, self.builder.joint
        if not state["replaying"] or not together.has_collisions(
            state["allocations"], neighbors.slot_collisions()
        ):
            return False
        if neighbors.shares_memory() and not together:
            return False  # the blocking buffers may belong to other clients
        settled = [pattern for pattern in patterns if not self._is_young(pattern)]
        return together.is_due(list(self.registry), settled, state["iterations"])

    def wake_conditions(self) -> dict[str, int]:
        """Return the arguments of `Client.wait_for_work`: the conditions that wake the planner."""
        allocations, layouts = self._client.state()["allocations"], self.builder.neighbors.avoided_layouts
        return {
            "allocations": allocations + max(1, self.registry.allocations_until_verdict()),
            "replan_at_iteration": self.builder.around_backoff.allowed_at,
            **({} if layouts is None else {"other_layouts": layouts}),
        }

    def resume_if_changed(self) -> None:
        """Record again if the pattern has changed permanently or, without a plan, after a long pause."""
        if self._client.resume_recording():
            log.info("recording again")
            self.builder.recording_begins()

    def drop_if_useless(self) -> None:
        """Drop all plans if the program does not follow them, or if they are not profitable."""
        if self.registry.are_useless():
            log.info("nothing follows the plan")
            self.builder.forget()
            self._client.advance_recording("dropped")
        elif reason := self._reason_to_withdraw():
            log.warning("the plan is withdrawn: %s", reason)
            self.withdrawal_reason = reason
            self._client.note_decision("withdrawn")
            self.builder.forget()
            self._client.advance_recording("failed")  # pauses for long

    def _reason_to_withdraw(self) -> str:
        """Return why the plans of marked iterations are unprofitable; empty if profitable or if undecided.

        Hits may be few until another variant has a plan, or until plans avoid the buffers that block them.
        The time of iterations is compared once for each new plan, by the fastest iteration, since noise of
        the machine only makes iterations slower. Under a budget nothing is compared: hits and time depend on
        the offloads, which differ before and after the plan.
        """
        state = self._client.state()
        now, since = state["iterations"], max(self.registry.installed_at_iteration, self._paid_at_iteration)
        has_budget = self._client.pool.stats()["budget_bytes"] <= sys.maxsize
        judged = state["replaying"] and state["marked"] and not state["refusal"] and not has_budget
        if not judged or self.registry.are_given() or self._client.pinned_ranges():
            self._paid_at_iteration = now
            return ""
        unplanned, planned = self._client.results()
        last = planned[: _core.JUDGED_ITERATIONS]
        hits, misses = (sum(result[column] for result in last) for column in (0, 1))
        if hits >= _core.LEAST_HIT_RATE * (hits + misses):
            self._paid_at_iteration = now
        elif now - since >= _core.LEARNING_ITERATIONS:
            return f"{hits / (hits + misses):.0%} of the requests hit in its last {len(last)} iterations"
        before, after = ([seconds for *_, seconds in results if seconds] for results in (unplanned, planned))
        few = len(before) < _core.JUDGED_ITERATIONS or len(after) < _core.KEPT_ITERATIONS
        if few or self._timed_plans == self.registry.made:
            return ""
        self._timed_plans = self.registry.made
        # not of the module `statistics`, whose import takes a megabyte of the program's memory
        middle_before, middle_after = (sorted(times)[len(times) // 2] for times in (before, after))
        if min(after) <= OPTIONS.max_slowdown * middle_before:
            return ""
        return f"an iteration takes {1e3 * middle_after:.4g} ms, {1e3 * middle_before:.4g} ms without"

"""Tracking of a schedule's iterations: recording, planning, and the position within the schedule."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from mempool.logs import log
from mempool.torch.eager.patterns import (
    RELOAD,
    OffloadPattern,
    OffloadSchedule,
    OperationActions,
    PatternRegistry,
)
from mempool.torch.eager.pool_headroom import PoolLearning
from mempool.torch.eager.recorded_iteration import RecordedIteration
from mempool.torch.eager.schedule_planner import SchedulePlanner
from mempool.torch.eager.storages import OFFLOADED
from mempool.torch.offload.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mempool import _core
    from mempool.torch.eager.op_footprints import Footprint
    from mempool.torch.eager.pool_headroom import PoolHeadroom
    from mempool.torch.eager.schedule_follower import ScheduleFollower
    from mempool.torch.eager.storages import StorageRecord, StorageRegistry
    from mempool.torch.eager.transfers import OffloadCounters, TransferManager
    from mempool.torch.offload.engine import Engine


class Iterations:
    """Follows an offload schedule while the iteration matches the recorded one.

    The next pattern is predicted from the order of past patterns. When an operation contradicts the
    prediction, the class switches to another pattern that matches the iteration so far.

    Attributes:
        limit_bytes: limit for plans, bytes.
        planner: maker of the schedules.
        current: recording of the current iteration.
        is_following: whether the current iteration has matched the schedule so far.
        footprints: see `OffloadPattern`; one list for all iterations without a schedule.
        actions: the schedule's actions for each operation.
        patterns: the recurring iterations.
        pattern: the pattern followed now or last.
        follower: follows schedules without the mode; None: the mode sees every operation.
    """

    def __init__(
        self,
        engine: Engine,
        storages: StorageRegistry,
        transfers: TransferManager,
        counts: OffloadCounters,
        limit_bytes: int,
        host_bytes: int | None = None,
        client: _core.Client | None = None,
        room: PoolHeadroom | None = None,
    ) -> None:
        self._engine = engine
        self._storages = storages
        self._transfers = transfers
        self._counts = counts
        self.planner = SchedulePlanner(engine, host_bytes, storages.alignment)
        self._learning = PoolLearning(client)
        self._headroom = room
        self._evictions_before = 0  # evictions and delays when this iteration began
        self.limit_bytes = self._requested_bytes = limit_bytes
        self.is_following = False
        self.footprints: list[tuple[Any, int, Footprint]] = []
        self._shared_footprints = self.footprints
        self.actions: list[OperationActions] = []
        self._row_bytes: list[int] = []
        self.current = RecordedIteration()
        self.patterns = PatternRegistry()
        self.follower: ScheduleFollower | None = None
        self.pattern: OffloadPattern | None = None
        self._first: OffloadPattern | None = None  # the first, whose storages persist
        self._sizes_differ = self._has_warned = False
        self._rows: dict[int, StorageRecord] = {}
        self._bound: list[StorageRecord] = []  # of this iteration's storages
        self._bound_schedule: OffloadSchedule | None = None
        self._finished_reloads: list[tuple[int, Any]] = []  # (row of the schedule, reload)

    def set_limit(self, limit_bytes: int) -> None:
        """Replace the limit, before any schedule has been made."""
        self.limit_bytes = self._requested_bytes = limit_bytes

    @property
    def schedule(self) -> OffloadSchedule | None:
        """Return the offload schedule followed now or last; None if there is none yet."""
        return None if self.pattern is None else self.pattern.schedule

    @property
    def reload_limit_bytes(self) -> int:
        """Return the limit, or the schedule's peak if larger: holding less at other times gains nothing."""
        return (
            self.limit_bytes
            if self.schedule is None
            else max(self.limit_bytes, self.schedule.swap.limit_bytes)
        )

    @property
    def holds_limit(self) -> bool:
        """Return whether the schedule is followed and holds the planned limit without further evictions."""
        return self.is_following and self.pattern is not None and self.pattern.holds_limit

    @property
    def _is_timed(self) -> bool:
        """Return whether to measure the durations of operations that follow the schedule: on a GPU only.

        Durations on a CPU vary with the machine's other work.
        """
        pattern = self.pattern if self._engine.streams else None
        return pattern is not None and pattern.timed_iterations < OPTIONS.timed_iterations

    @property
    def is_final(self) -> bool:
        """Return whether the schedule is followed and the pool may plan for it: the moves are final."""
        return self.holds_limit and self.pattern is not None and self.pattern.is_stable

    @property
    def resident_limit_bytes(self) -> int:
        """Return the most bytes that may be resident at once, independent of the pool's report.

        If the schedule does not hold its limit, the value is the same in all iterations, so that the same
        evictions recur.
        """
        if self._headroom is None or self.pattern is None:
            return self.limit_bytes
        return self.pattern.limit_bytes if not self.pattern.holds_limit else self._headroom.limit_bytes

    @property
    def bound_records(self) -> dict[int, StorageRecord]:
        """Return the records of the storages that are bound to rows of the schedule."""
        return self._rows

    # --- operations

    def start_operation(self, func: Any, given: list[StorageRecord]) -> None:
        """Make the schedule's moves before the next operation, which has the argument storages `given`."""
        at = len(self.current.functions)
        known = at < len(self.actions) and self.actions[at].function is func
        if not known:
            if not self._switch(func):
                self._leave_schedule()
                self._learning.set(on=False)  # moves on demand make lifetimes accidental
                return
            if self.follower is not None:
                self.follower.continue_with_other()
        self.move_before(at, given)

    def move_before(self, at: int, given: Iterable[StorageRecord]) -> None:
        """Make the moves due before operation `at`; the storages `given` stay."""
        for action, row in self.actions[at].before:
            if (record := self._rows.get(row)) is None:
                continue
            if action != RELOAD:
                if not any(record is one for one in given):
                    self._transfers.release(record)
            elif self._has_room(record):  # without room, reloaded on demand
                self._transfers.reload(record)

    def _has_room(self, record: StorageRecord) -> bool:
        if self._storages.resident_bytes + record.rounded_bytes > self.reload_limit_bytes:
            return False
        if self._headroom is None or record.state != OFFLOADED:
            return True
        has = not self._headroom.lacks(record.rounded_bytes)
        self._counts.delayed_reloads += not has
        return has

    def remember_footprint(self, func: Any, given: int, need: Footprint) -> None:
        """Remember the footprint of the next operation: see `OffloadPattern.footprints`."""
        at = len(self.current.functions)
        if at < len(self.footprints):
            self.footprints[at] = func, given, need
        elif at == len(self.footprints) < OPTIONS.max_iteration_footprints:
            self.footprints.append((func, given, need))

    def mark_start(self, footprint: Footprint) -> None:
        """Mark the beginning of an operation, unless the schedule knows all durations.

        The operation's memory is allocated and freed once before the mark, since the pool may wait for all
        copies in that allocation.
        """
        if not self.is_following or self._sizes_differ or self._is_timed:
            prepare = None
            if self._headroom is not None:
                sizes = footprint.result_bytes, footprint.workspace_bytes if footprint.samples else 0
                prepare = functools.partial(self._headroom.prepare, sizes) if any(sizes) else None
            self.current.marks[len(self.current.functions)] = self._engine.mark(prepare)
        elif self._engine.streams:
            self._engine.note_stream()

    def end_operation(
        self, func: Any, given: list[StorageRecord], written: list[StorageRecord], made: list[StorageRecord]
    ) -> None:
        """Record an operation that has run, and start the offloads planned after it."""
        recording = self.current
        at, touched = len(recording.functions), recording.access_codes
        recording.functions.append(func)
        recording.first_access.append(len(touched))
        for record in given:
            touched.append(record.number << 1)
        for record in written:
            touched.append(record.number << 1 | 1)
        for record in made:
            recording.births.append((record.number, at, record.rounded_bytes))
            touched.append(record.number << 1 | 1)
        if self.is_following:
            self.move_after(at, made)
        if at + 1 >= OPTIONS.max_iteration_operations:
            self.begin()

    def move_after(self, at: int, made: Iterable[StorageRecord]) -> None:
        """Start the offloads due after operation `at`, and bind the operation's new storages to rows."""
        line, rows = self.actions[at], self._rows
        for record, row in zip(made, line.results, strict=False):
            rows[row] = record
            record.row = row
            self._bound.append(record)
            if record.rounded_bytes != self._row_bytes[row] and not self._sizes_differ:
                self._sizes_differ = not self._switch()
                line = self.actions[at]
        self.note_finished_reloads(at)
        for row in line.dropped_copies:
            if (back := rows.get(row)) is not None:
                self._transfers.drop_copy(back)
        for row, place in line.after:
            if (leaves := rows.get(row)) is not None:
                self._transfers.offload(leaves, place)

    def note_finished_reloads(self, at: int) -> None:
        """Record the reloads that operation `at` waited for."""
        if not self._transfers.finished_reloads:
            return
        if (schedule := self.schedule) is not None:
            for row, transfer in self._transfers.finished_reloads:
                if (move := schedule.reload_moves.get((at, row))) is not None:
                    self._finished_reloads.append((move, transfer))
        self._transfers.finished_reloads.clear()

    def skip_to(self, at: int) -> None:
        """Record the schedule's operations up to `at`, without accesses, since no code saw them run."""
        recording, schedule = self.current, self.schedule
        if schedule is not None and len(recording) < at:
            recording.functions += schedule.functions[len(recording) : at]
            recording.first_access += [len(recording.access_codes)] * (at - len(recording.first_access))

    def restore_recording(self) -> None:
        """Replace the recording by the schedule's recording up to the present, since the operations agree."""
        if (schedule := self.schedule) is None or not len(self.current):
            return
        former, recorded, at = self.current, schedule.recording, len(self.current)
        bound = {row: record.number for row, record in self._rows.items()}
        number = {
            other: bound[row] if row in bound else self._storages.next_number()
            for row, other in enumerate(schedule.recorded.numbers)
        }
        alive = {record.number for record in list(self._storages.records.values())}
        codes = recorded.access_codes[: (*recorded.first_access, len(recorded.access_codes))[at]]
        births = {**recorded.argument_births, **former.argument_births}
        self.current = RecordedIteration(
            functions=recorded.functions[:at],
            workspaces={k: room for k, room in recorded.workspaces.items() if k < at},
            initial_records=former.initial_records,
            births=[
                *((number[other], when, room) for other, when, room in recorded.births if when < at),
                *(one for one in former.births if one[1] >= at),
            ],
            argument_births={
                k: count for k, count in births.items() if k < at or k in former.argument_births
            },
            access_codes=[number.get(code >> 1, -1) << 1 | code & 1 for code in codes],
            first_access=recorded.first_access[:at],
            deaths={
                number[other]: min(when, at)
                for other, when in recorded.deaths.items()
                if other in number and number[other] not in alive
            }
            | former.deaths,
        )

    def next_use(self, record: StorageRecord) -> int | None:
        """Return the number of operations until the next use of a storage; None without a schedule."""
        if not self.is_following or self.schedule is None or record.row < 0:
            return None
        return self.schedule.uses.next_use(record.row, len(self.current))

    def record_view(self, record: StorageRecord, *, written: bool = False) -> None:
        """Record a view of a storage, or of single entries, as an access by the previous operation."""
        self.current.access_codes.append(record.number << 1 | written)

    def record_argument(self, record: StorageRecord) -> None:
        """Record a storage that no operation made, such as a batch from another thread."""
        at = len(self.current)
        record.birth = at, -1 - self.current.argument_births.get(at, 0)
        self.current.argument_births[at] = -record.birth[1]
        self.current.births.append((record.number, at, record.rounded_bytes))
        if self.is_following:
            self.bind(record)

    def bind(self, record: StorageRecord) -> None:
        """Bind a storage made in this iteration to the schedule's row with the same birth."""
        if (schedule := self.schedule) is None or record.birth is None:
            return
        if (row := schedule.recorded.row_of_birth.get(record.birth)) is not None:
            self._rows[row] = record
            record.row = row
            self._bound.append(record)
            if record.rounded_bytes != schedule.row_bytes[row] and not self._sizes_differ:
                self._sizes_differ = not self._switch()

    def record_death(self, record: StorageRecord) -> None:
        """Record the end of a storage."""
        self.current.deaths[record.number] = len(self.current)
        if self._rows.get(record.row) is record:
            del self._rows[record.row]

    def _switch(self, func: Any = None) -> bool:
        """Switch to another schedule that matches the iteration so far; return whether one exists."""
        if self.follower is not None:
            self.follower.take_over()
        if (other := self.patterns.matching_prefix(self.current, func, self.pattern)) is None:
            return False
        self.pattern, self._sizes_differ = other, False
        if self._headroom is not None:
            self._headroom.is_checked |= not (other.is_served and self.is_final)
        self._bind_rows(other.schedule)
        self._catch_up(other.schedule)
        self._learning.set(on=other.is_stable)
        return True

    def _leave_schedule(self) -> None:
        """Leave the schedule, and wait for the transfers under way."""
        if self.follower is not None:
            self.follower.take_over()
        self.is_following = False
        if self._headroom is not None:
            self._headroom.is_checked = True
        self._transfers.wait_all()

    # --- between iterations

    def end(self) -> None:
        """End the current iteration and begin the next."""
        recording, goes_on = self.current, self.has_followed_schedule and not self._knows_more()
        if len(recording):
            self._counts.end_iteration()
            if not goes_on or self._is_timed:
                recording.marks[len(recording)] = self._engine.mark()
            if not goes_on:
                self._handle_unplanned(recording)
            elif self.pattern is not None:
                self._adapt_to_waits(self.pattern)
            self._engine.end_iteration()
            before, self.pattern = self.pattern, self.patterns.predict_next()
            goes_on = goes_on and before is self.pattern
        self._begin_iteration(goes_on=goes_on or not len(recording))

    def begin(self) -> None:
        """Begin an iteration; drop the recording of operations between iterations."""
        if len(self.current):
            self.resume()

    def suspend(self) -> None:
        """Stop recording and following schedules until `resume`.

        A repeated call drops the recording again.
        """
        self._leave_schedule()
        if self._engine.streams:
            self._engine.note_stream()
        self.current = RecordedIteration()

    def let_pool_learn(self) -> None:
        """Let the pool learn while storages do not move."""
        self._learning.begin()

    def resume(self) -> None:
        """Begin an iteration whose operations are all seen."""
        self._transfers.wait_all()
        self._begin_iteration(goes_on=False)

    def close(self) -> None:
        """Let the pool learn after the last iteration."""
        self._learning.begin()

    def forget(self) -> None:
        """Drop all patterns, since the iterations were detected wrongly; keep the current recording."""
        if self.schedule is not None:
            self._leave_schedule()
        self.pattern = self._first = None
        self.patterns.clear()

    @property
    def has_followed_schedule(self) -> bool:
        """Return whether the current recording is a whole iteration that followed the schedule."""
        schedule = self.schedule
        return (
            schedule is not None
            and self.is_following
            and len(self.current) == len(schedule)
            and not self._sizes_differ
        )

    def _knows_more(self) -> bool:
        """Return whether the first iteration's schedule leaves storages resident that it met as arguments."""
        if self.pattern is None or self.pattern is not self._first:
            return False
        recorded = self.pattern.schedule.recorded
        met = {recorded.numbers[row] for (_, place), row in recorded.row_of_birth.items() if place < 0}
        return any(one.number in met and one() is not None for one in self.current.initial_records)

    def _adapt_to_waits(self, pattern: OffloadPattern) -> None:
        """Adapt the schedule of an iteration to the waits that occurred."""
        schedule = pattern.schedule
        pattern.was_followed, before = True, pattern.finished_reloads
        self.patterns.record_end(pattern)
        self.planner.warn(schedule, pattern.limit_bytes, self._requested_bytes)
        arrived, pattern.finished_reloads = self._finished_reloads, [*self._finished_reloads]
        if self._engine.streams:  # the device lags: waits are known one iteration later
            arrived = before
        if self._is_timed and self._retime(pattern):
            return
        if self._headroom is not None and self._headroom.has_places:
            self._record_stable(pattern)
            return  # the pool's plan depends on these moves
        if pattern.record_disturbance(disturbed=self._was_disturbed()) and self._replan_lower(pattern, 0):
            return
        limit = self.limit_bytes if self._headroom is None else pattern.limit_bytes
        if self._may_change(pattern) and (
            better := self.planner.start_reloads_earlier(schedule, arrived, limit)
        ):
            self._replace(pattern, better)
            self._counts.changes += 1
        else:
            self._record_stable(pattern)

    def _retime(self, pattern: OffloadPattern) -> bool:
        """Measure the durations of operations again; return whether the moves changed."""
        pattern.timed_iterations += 1
        seconds = self.current.seconds(self._engine, pattern.schedule)
        if (made := self.planner.retime(pattern.schedule, seconds, pattern.limit_bytes)) is None:
            return False
        self._counts.plans += 1
        self._replace(pattern, made)
        return True

    def _record_stable(self, pattern: OffloadPattern) -> None:
        pattern.stable_iterations += 1
        if pattern.stable_iterations == OPTIONS.stable_iterations:
            self._learning.begin()

    def _may_change(self, pattern: OffloadPattern) -> bool:
        """Return whether moves may still adapt to waits; the pool needs moves that stop changing."""
        return self._headroom is None or (
            pattern.schedule.changes < OPTIONS.max_wait_changes_with_pool and not pattern.is_stable
        )

    def _replace(self, pattern: OffloadPattern, schedule: OffloadSchedule) -> None:
        pattern.schedule, pattern.finished_reloads, pattern.expected = schedule, [], None
        pattern.stable_iterations = pattern.disturbed_iterations = 0
        pattern.forget_places(pattern.arena_bytes)

    def _was_disturbed(self) -> bool:
        """Return whether the pool, holding more than live bytes, caused evictions or delayed reloads."""
        return (
            self._headroom is not None
            and self._counts.evicted + self._counts.delayed_reloads > self._evictions_before
        )

    def _replan_lower(self, pattern: OffloadPattern, less: int) -> bool:
        """Replan for at least `less` bytes less.

        Return False after the last try or without a better schedule.
        """
        if pattern.lower_limits >= OPTIONS.max_lower_limits or not pattern.holds_limit:
            return False
        pattern.lower_limits += 1
        limit = min(
            self.limit_bytes, pattern.limit_bytes - max(less, self.limit_bytes // OPTIONS.lower_limit_divisor)
        )

        def needed(schedule: OffloadSchedule) -> tuple[int, int]:
            return max(self.planner.arena_bytes(schedule), limit), schedule.swap.limit_bytes

        made = self.planner.replan(pattern.schedule, limit)
        if made is None or needed(made) >= needed(pattern.schedule):
            return False
        pattern.limit_bytes = max(limit, made.swap.limit_bytes)  # so that evictions add no moves
        self._counts.plans += 1
        self._replace(pattern, made)
        return True

    def ignore_evictions(self) -> None:
        """Exclude the evictions so far of this iteration from `_was_disturbed`: they had another reason."""
        self._evictions_before = self._counts.evicted + self._counts.delayed_reloads

    def replan_lower(self, less: int) -> bool:
        """Replan at the beginning of an iteration for `less` bytes less; return whether that succeeded."""
        if self.pattern is None or not self._replan_lower(self.pattern, less):
            return False
        self._begin_iteration(goes_on=False)
        return True

    def _handle_unplanned(self, recording: RecordedIteration) -> None:
        """Make a schedule for an unplanned iteration that recurs or is among the first two iterations."""
        if self.schedule is not None:
            self._counts.diverged += not self.has_followed_schedule
            self._transfers.wait_all()
            self._warn_of_variety()
        made = None
        worth = not len(self.patterns) or self._first is not None or self.patterns.recurs(recording)
        if worth and (schedule := self._make_schedule(recording)) is not None:
            made = self.patterns.add(schedule)
            made.limit_bytes = self.limit_bytes
            if self._first is not None and not self._first.was_followed:
                self.patterns.drop(self._first)
            self._first = made if self.schedule is None else None
            self.pattern = made
        self.patterns.record_end(made)

    def _warn_of_variety(self) -> None:
        """Warn once if tensors move in many iterations without a matching schedule."""
        counts = self._counts
        if (
            self._has_warned
            or counts.diverged < OPTIONS.reported_divergences
            or 2 * counts.diverged < counts.iterations
            or not counts.iteration_out_bytes + counts.iteration_in_bytes
        ):
            return
        self._has_warned = True
        log.warning(
            "%s of %s iterations followed no plan of moves, since their operations or sizes differ from "
            "earlier iterations: tensors move when an operation needs them, which takes longer. Plans need "
            "batches that recur: pad them to at most %s lengths",
            counts.diverged,
            counts.iterations,
            OPTIONS.max_patterns,
        )

    def _make_schedule(self, recording: RecordedIteration) -> OffloadSchedule | None:
        made = self.planner.plan_iteration(recording, self.schedule, self.limit_bytes)
        recording.marks.clear()  # on CUDA each mark is an event
        if made is None:
            return None
        self._counts.plans += 1
        self._counts.margin_bytes = max(self.limit_bytes - made.swap.limit_bytes, 0)
        return made

    def _begin_iteration(self, *, goes_on: bool) -> None:
        self.current = RecordedIteration(initial_records=list(self._storages.records.values()))
        self._sizes_differ = False
        for record in self.current.initial_records:
            record.birth = None
        self.is_following = self.schedule is not None
        self.ignore_evictions()
        if self._headroom is not None:
            self._headroom.begin(by_plan=self.is_final)
        if goes_on and self.schedule is self._bound_schedule:
            self._unbind_made()
        else:
            self._bind_rows(self.schedule)
        if self.schedule is not None and not goes_on:
            self._catch_up(self.schedule)
        if self.pattern is not None:  # after `_catch_up`, whose reloads do not count
            self._learning.set(on=self.pattern.is_stable)

    def _unbind_made(self) -> None:
        """Unbind the storages of the last iteration, since the next one follows the same schedule."""
        for record in self._bound:
            if self._rows.get(record.row) is record:
                del self._rows[record.row]
            record.row = -1
        self._bound.clear()
        self._finished_reloads.clear()
        self._transfers.finished_reloads.clear()

    def _bind_rows(self, schedule: OffloadSchedule | None) -> None:
        """Bind the schedule's rows to the persistent storages and to the storages made so far."""
        self.footprints = self._shared_footprints if self.pattern is None else self.pattern.footprints
        self.actions, self._row_bytes = (
            ([], []) if schedule is None else (schedule.actions, schedule.row_bytes)
        )
        self._rows.clear()
        self._bound.clear()
        self._bound_schedule = schedule
        self._finished_reloads.clear()
        self._transfers.finished_reloads.clear()
        alive: dict[int, StorageRecord] = {}
        for record in list(self._storages.records.values()):
            record.row = -1
            alive[record.number] = record
        if schedule is None:
            return
        rows = [(row, alive.get(number)) for row, number in schedule.persistent_rows]
        rows += [
            (schedule.recorded.row_of_birth[record.birth], record)
            for record in alive.values()
            if record.birth is not None and record.birth in schedule.recorded.row_of_birth
        ]
        for row, bound in rows:
            if bound is not None:
                self._rows[row] = bound
                bound.row = row
                if bound.birth is not None:
                    self._bound.append(bound)

    def _catch_up(self, schedule: OffloadSchedule) -> None:
        """Begin a schedule at this operation: offload and reload storages to match the schedule's state."""
        at = len(self.current)
        away = set(schedule.offloaded_rows(at))
        for record in list(self._storages.records.values()):
            if record.row not in away:
                self._transfers.drop_copy(record)  # the schedule reuses the copy's host memory
        for row, record in sorted(self._rows.items(), key=lambda bound: schedule.uses.next_use(bound[0], at)):
            if row in away:
                self._transfers.offload(record)
            elif schedule.row_bytes[row] and self._has_room(record):
                self._transfers.reload(record)

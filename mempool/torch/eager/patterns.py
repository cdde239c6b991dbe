"""Recurring iterations of a program, and an offload schedule for each."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from mempool.torch.eager.recorded_iteration import NextUse, RecordedIteration
from mempool.torch.offload.options import OPTIONS

if TYPE_CHECKING:
    from mempool.torch.eager.op_footprints import Footprint
    from mempool.torch.eager.recorded_iteration import RecordedStep
    from mempool.torch.eager.schedule_follower import ExpectedOperations
    from mempool.torch.offload.host_placement import HostCopies
    from solvers.swap import PlannedSchedule

#: Actions before an operation, in this order: free memory, then allocate memory and fill it.
RELEASE, RELOAD = range(2)


class OperationActions(NamedTuple):
    """Entry of an offload schedule for one operation."""

    function: Any  #: the operation
    before: tuple[tuple[int, int], ...]  #: (RELEASE or RELOAD, row), in order
    after: tuple[tuple[int, int], ...]  #: (offloaded row, address of the copy on the host)
    dropped_copies: tuple[int, ...]  #: rows whose copies on the host are no longer needed
    results: tuple[int, ...]  #: rows of the operation's results, in order


@dataclass
class OffloadSchedule:
    """Actions around each operation of an iteration.

    Attributes:
        recording: the recorded iteration.
        recorded: the recording as a step.
        swap: the schedule, and the result of the schedule's replay.
        before: for each operation, the (RELEASE or RELOAD, row) before it, in order.
        copies: places of the copies on the host.
        after: for each operation, the (offloaded row, place of the copy on the host) after it.
        dropped_copies: for each operation, the rows whose copies on the host are no longer needed afterwards.
        row_bytes: bytes of each row.
        reload_moves: row of the schedule, by (operation that uses the reloaded buffer, row of the buffer).
        changes: number of changes of the schedule after waits.
    """

    recording: RecordedIteration
    recorded: RecordedStep
    swap: PlannedSchedule
    copies: HostCopies
    before: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    after: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    dropped_copies: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    row_bytes: list[int] = field(default_factory=list)
    reload_moves: dict[tuple[int, int], int] = field(default_factory=dict)
    changes: int = 0

    def __len__(self) -> int:
        return len(self.recording)

    @property
    def functions(self) -> list[Any]:
        """Return the function of each operation."""
        return self.recording.functions

    def offloaded_rows(self, at: int) -> list[int]:
        """Return the rows that are offloaded or being offloaded before an operation."""
        moves, k = self.swap.schedule, len(self)
        now = (moves.out < at) & (at <= moves.fetch)
        found: list[int] = moves.buffer[now | (moves.out < at + k) & (at + k <= moves.fetch)].tolist()
        return found

    @cached_property
    def persistent_rows(self) -> list[tuple[int, int]]:
        """Return (row, storage number) of each persistent storage."""
        stays = self.recorded.step.persistent.nonzero()[0].tolist()
        return [(row, self.recorded.numbers[row]) for row in stays]

    @cached_property
    def actions(self) -> list[OperationActions]:
        """Return the entries of all operations."""
        made: dict[int, list[int]] = defaultdict(list)
        for (at, place), row in sorted(self.recorded.row_of_birth.items()):
            if place >= 0:
                made[at].append(row)
        return [
            OperationActions(
                function,
                tuple(self.before.get(at, ())),
                tuple(self.after.get(at, ())),
                tuple(self.dropped_copies.get(at, ())),
                tuple(made[at]),
            )
            for at, function in enumerate(self.functions)
        ]

    @cached_property
    def uses(self) -> NextUse:
        """Return the lookup of each row's next use."""
        return NextUse(self.recorded.step)


def schedule_of(
    recording: RecordedIteration,
    recorded: RecordedStep,
    swap: PlannedSchedule,
    copies: HostCopies,
    changes: int = 0,
) -> OffloadSchedule:
    """Convert a schedule and its host copies to actions; `changes`: number of changes after waits."""
    k, moves = len(recording), swap.schedule
    made = OffloadSchedule(
        recording, recorded, swap, copies, row_bytes=recorded.step.size.tolist(), changes=changes
    )
    for row in moves.release.argsort(kind="stable").tolist():
        buffer = int(moves.buffer[row])
        made.after[int(moves.out[row]) % k].append((buffer, int(copies.at[row])))
        made.before[int(moves.release[row]) % k].append((RELEASE, buffer))
    for row in moves.use.argsort(kind="stable").tolist():
        buffer = int(moves.buffer[row])
        if (buffer, int(moves.use[row]) % k) in recorded.unread:
            continue
        made.before[int(moves.fetch[row]) % k].append((RELOAD, buffer))
        made.reload_moves[int(moves.use[row]) % k, buffer] = row
    for last, row in zip(copies.last.tolist(), copies.of.tolist(), strict=True):
        made.dropped_copies[last].append(row)
    for actions in made.before.values():
        actions.sort(key=lambda action: action[0])
    return made


@dataclass(eq=False)
class OffloadPattern:
    """A recurring iteration and its offload schedule.

    Attributes:
        schedule: offload schedule, by operation.
        was_followed: whether an iteration followed the schedule.
        last_used: number of the last iteration of this pattern.
        footprints: for each operation, the operation, the bytes of its tensor arguments, and the footprint.
        timed_iterations: iterations that followed the schedule and measured the durations of operations.
        limit_bytes: limit for which the moves were planned, bytes.
        lower_limits: number of replans for a lower limit.
        finished_reloads: rows of the schedule and their reloads, of the last iteration that followed it.
        expected: the operations that the interposer expects; None until learned.
        homes: (address, offset in the arena or None) of each storage that is resident before an iteration, by
            number of the storage; empty until the pool's plan serves the pattern.
        arena_bytes: size of the arena that `homes` describes.
        stable_iterations: iterations that followed unchanged moves.
        disturbed_iterations: latest iterations in a row with evictions or delayed reloads.
        is_served: whether nearly all requests of an iteration have had planned slots in the arena.
    """

    schedule: OffloadSchedule
    was_followed: bool = False
    last_used: int = 0
    timed_iterations: int = 0
    limit_bytes: int = 0
    lower_limits: int = 0
    footprints: list[tuple[Any, int, Footprint]] = field(default_factory=list)
    finished_reloads: list[tuple[int, Any]] = field(default_factory=list)
    expected: ExpectedOperations | None = None
    homes: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    arena_bytes: int = 0
    stable_iterations: int = 0
    disturbed_iterations: int = 0
    is_served: bool = False

    def forget_places(self, arena_bytes: int) -> None:
        """Forget the addresses of storages in the arena, which was replaced or has another plan."""
        self.homes, self.is_served, self.arena_bytes = {}, False, arena_bytes

    def record_disturbance(self, *, disturbed: bool) -> bool:
        """Record whether an iteration evicted storages or delayed reloads; return whether several did."""
        self.disturbed_iterations = self.disturbed_iterations + 1 if disturbed else 0
        return self.disturbed_iterations >= OPTIONS.disturbed_iterations

    @property
    def is_stable(self) -> bool:
        """Return whether the moves are final, so that the pool may plan for them."""
        return self.stable_iterations >= OPTIONS.stable_iterations

    @property
    def holds_limit(self) -> bool:
        """Return whether the moves hold the planned limit without unplanned evictions."""
        return self.schedule.swap.limit_bytes <= self.limit_bytes


class PatternRegistry:
    """Registry of recurring iterations: training, evaluation, accumulation, batches of several shapes."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all patterns and iterations."""
        self._patterns: list[OffloadPattern] = []
        self._unplanned: deque[RecordedIteration] = deque(maxlen=OPTIONS.unplanned_iterations)
        self.order: deque[OffloadPattern | None] = deque(maxlen=OPTIONS.pattern_history)
        self._now = 0

    def __len__(self) -> int:
        return len(self._patterns)

    def record_end(self, pattern: OffloadPattern | None) -> None:
        """Record the end of an iteration, with the iteration's pattern or None."""
        self._now += 1
        self.order.append(pattern)
        if pattern is not None:
            pattern.last_used = self._now

    def recurs(self, recording: RecordedIteration) -> bool:
        """Return whether an iteration without a schedule matches a recent one and deserves a schedule.

        A recording without a match is remembered for later comparisons.
        """
        if any(recording.matches(kept.schedule.recording) for kept in self._patterns):
            return False
        if not any(recording.matches(seen) for seen in self._unplanned):
            self._unplanned.append(RecordedIteration(functions=recording.functions, births=recording.births))
            return False
        return (
            len(self._patterns) < OPTIONS.max_patterns
            or self._now - self._oldest().last_used >= OPTIONS.stale_iterations
        )

    def add(self, schedule: OffloadSchedule) -> OffloadPattern:
        """Add the schedule made from the last iteration; a full registry drops the least recently used."""
        if len(self._patterns) >= OPTIONS.max_patterns:
            self.drop(self._oldest())
        self._patterns.append(made := OffloadPattern(schedule))
        self._unplanned = deque(
            (seen for seen in self._unplanned if not seen.matches(schedule.recording)),
            maxlen=OPTIONS.unplanned_iterations,
        )
        return made

    def drop(self, pattern: OffloadPattern) -> None:
        """Remove a pattern."""
        self._patterns.remove(pattern)
        self.order = deque(
            (None if other is pattern else other for other in self.order), maxlen=OPTIONS.pattern_history
        )

    def predict_next(self) -> OffloadPattern | None:
        """Predict the next pattern: the successor of the longest past run that equals the last iterations.

        Of equally long runs, the most frequent successor is chosen, and of equally frequent ones, that of the
        latest run. Without any such run, the most frequent pattern is chosen, and of equally frequent ones,
        the latest.
        """
        order = list(self.order)
        best, found = 0, list[OffloadPattern]()
        for at in range(len(order) - 1, 0, -1):
            if at < best:  # earlier runs are all shorter
                break
            if (after := order[at]) is None or (best and order[at - best] is not order[-best]):
                continue
            length = 0
            while length < at and order[at - 1 - length] is order[-1 - length]:
                length += 1
            if length > best:
                best, found = length, []
            if length == best > 0:
                found.append(after)
        return max(found, key=found.count, default=None) or max(
            self._patterns, key=lambda one: (self.order.count(one), one.last_used), default=None
        )

    def matching_prefix(
        self, recording: RecordedIteration, func: Any, but: OffloadPattern | None
    ) -> OffloadPattern | None:
        """Return a pattern other than `but` whose beginning matches this iteration, followed by `func`.

        With None for `func`, any next operation matches.
        """
        at = len(recording)
        births = [(when, room) for _, when, room in recording.births]
        for pattern in self._patterns:
            other = pattern.schedule.recording
            if (
                pattern is not but
                and len(other) > at
                and (func is None or other.functions[at] is func)
                and other.functions[:at] == recording.functions
                and [(when, room) for _, when, room in other.births[: len(births)]] == births
            ):
                return pattern
        return None

    def _oldest(self) -> OffloadPattern:
        return min(self._patterns, key=lambda pattern: pattern.last_used)

"""Recorded iterations: operations, detection of the period, and conversion to a step."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mempool.torch.offload.options import OPTIONS
from solvers.swap import Step
from traces.iterations.cycles import tail_period

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mempool.torch.eager.patterns import OffloadSchedule
    from mempool.torch.eager.storages import StorageRecord
    from mempool.torch.offload.engine import Engine


@dataclass
class RecordedIteration:
    """One recorded iteration. Times are operation numbers, 0 to K - 1.

    Attributes:
        functions: function of each operation; views and queries are not recorded.
        marks: by operation, the engine's mark at the beginning; key K has the mark at the end of the last
            operation. The durations of operations without marks are taken from the iteration that the
            schedule was made from.
        workspaces: by operation, bytes of the workspace, without results.
        initial_records: storages alive at the beginning.
        births: (number of the storage, operation, bytes) of each new storage, in order; also of each storage
            first seen as an argument.
        argument_births: by operation, the number of storages first seen as arguments of that operation.
        access_codes: accesses in order, each encoded as twice the number of the storage, plus 1 for a write.
            With tuples instead of integers, the garbage collector took a third of the cost of swapping.
        first_access: for each operation, the number of accesses before this operation.
        deaths: by number of the storage, the number of operations begun before the storage was found dead.
    """

    functions: list[Any] = field(default_factory=list)
    marks: dict[int, Any] = field(default_factory=dict)
    workspaces: dict[int, int] = field(default_factory=dict)
    initial_records: list[StorageRecord] = field(default_factory=list)
    births: list[tuple[int, int, int]] = field(default_factory=list)
    argument_births: dict[int, int] = field(default_factory=dict)
    access_codes: list[int] = field(default_factory=list)
    first_access: list[int] = field(default_factory=list)
    deaths: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.functions)

    def matches(self, other: RecordedIteration) -> bool:
        """Return whether another iteration has the same operations, with new buffers of the same sizes."""
        return self.functions == other.functions and [b[1:] for b in self.births] == [
            b[1:] for b in other.births
        ]

    def accesses(self) -> Iterator[tuple[int, int, bool]]:
        """Yield (storage number, operation, whether written).

        Accesses before operation 0 count for operation 0.
        """
        operations = np.searchsorted(self.first_access, np.arange(len(self.access_codes)), "right") - 1
        for code, at in zip(self.access_codes, operations.clip(0).tolist(), strict=True):
            yield code >> 1, at, bool(code & 1)

    def seconds(self, engine: Engine, plan: OffloadSchedule | None) -> list[float]:
        """Return the duration of each operation, in seconds.

        An operation without marks at its beginning and end has its duration in the schedule's iteration, or 0
        if that schedule is forgotten or was shorter.
        """
        seconds = [] if plan is None else plan.recorded.step.seconds.tolist()[: len(self)]
        seconds += [0.0] * (len(self) - len(seconds))
        for at, span in zip(self.marks, engine.seconds([*self.marks.values()]), strict=False):
            if at + 1 in self.marks:
                seconds[at] = span
        return seconds


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """A recording as a `Step`.

    Attributes:
        step: the step, with one row per storage alive at the beginning, then per new storage, then per
            workspace.
        numbers: for each row, the number of the storage; -1 for a workspace.
        row_of_birth: row of each new storage, by `StorageRecord.birth`.
        unread: (row, operation) of accesses that represent a death, not a read.
    """

    step: Step
    numbers: list[int]
    row_of_birth: dict[tuple[int, int], int]
    unread: frozenset[tuple[int, int]] = frozenset()


def recorded_step(recording: RecordedIteration, seconds: list[float]) -> RecordedStep:
    """Convert the recording of a whole iteration into a step on a circle.

    A storage alive at both the beginning and the end is persistent. A persistent storage that is movable and
    never accessed counts 0 bytes, since it is evicted on demand and never reloaded. A storage left over from
    the previous iteration takes memory until freed; a storage left for the next iteration takes memory from
    the operation that made the storage.

    A storage that lives long after its last access, such as a saved tensor that no backward reads, gets an
    artificial access at its death, so that the planner may offload the storage in between.
    `RecordedStep.unread` lists these accesses, for which nothing is reloaded.
    """
    k = len(recording)
    numbers = [record.number for record in recording.initial_records] + [
        number for number, _, _ in recording.births
    ]
    # An operation that raised is not recorded: storages first seen there count as seen after the last
    # operation.
    start = [0] * len(recording.initial_records) + [min(at, k - 1) for _, at, _ in recording.births]
    size = [record.rounded_bytes for record in recording.initial_records] + [
        room for _, _, room in recording.births
    ]
    end = [
        min(max(recording.deaths.get(number, k), first + 1), k)
        for number, first in zip(numbers, start, strict=True)
    ]
    stays = [
        i < len(recording.initial_records) and number not in recording.deaths
        for i, number in enumerate(numbers)
    ]
    row_of = {number: row for row, number in enumerate(numbers)}
    touched: dict[tuple[int, int], bool] = {}
    for number, at, wrote in recording.accesses():
        if (row := row_of.get(number)) is not None and start[row] <= at < end[row]:
            touched[row, at] = touched.get((row, at), False) or wrote
    last = dict(sorted(touched))
    unread = {
        (row, end[row] - 1)
        for row, at in last.items()
        if numbers[row] in recording.deaths and end[row] - 1 - at > k // OPTIONS.dead_tail_divisor + 1
    }
    touched.update(dict.fromkeys(unread, False))
    used = last.keys()
    for row, record in enumerate(recording.initial_records):
        if stays[row] and record.movable and row not in used:
            size[row] = 0
    for at, room in recording.workspaces.items():
        if room > 0:
            touched[len(numbers), at] = True
            numbers.append(-1)
            start.append(at)
            end.append(at + 1)
            size.append(room)
            stays.append(False)
    accesses = sorted(touched)
    row_of_birth = _rows_of_births(recording)
    step = Step(
        seconds=np.array(seconds),
        operation=np.arange(k, dtype=np.int32),
        start=np.array(start, np.int64),
        end=np.array(end, np.int64),
        size=np.array(size, np.int64),
        persistent=np.array(stays, np.bool_),
        ids=np.arange(len(numbers)),
        access_buffer=np.array([row for row, _ in accesses], np.int64),
        access_op=np.array([at for _, at in accesses], np.int64),
        access_writes=np.array([touched[key] for key in accesses], np.bool_),
        names=tuple(str(function) for function in recording.functions),
        circular=True,
    )
    return RecordedStep(step, numbers, row_of_birth, frozenset(unread))


def _rows_of_births(recording: RecordedIteration) -> dict[tuple[int, int], int]:
    """Return the row of each new storage by `StorageRecord.birth`, in the order of appearance."""
    rows: dict[tuple[int, int], int] = {}
    seen: dict[int, int] = {}
    for row, (_, at, _) in enumerate(recording.births, len(recording.initial_records)):
        # An operation's arguments are seen before its results.
        place, met = seen.get(at, 0), recording.argument_births.get(at, 0)
        rows[at, -1 - place if place < met else place - met] = row
        seen[at] = place + 1
    return rows


class NextUse:
    """Accesses of a step on a circle, by row of the buffer."""

    def __init__(self, step: Step) -> None:
        """Index the accesses of a step."""
        self._length = len(step)
        parts = np.searchsorted(step.access_buffer, np.arange(1, len(step.size)))
        self._accesses: list[list[int]] = [part.tolist() for part in np.split(step.access_op, parts)]
        self._end: list[int] = step.end.tolist()
        self._persistent: list[bool] = step.persistent.tolist()

    def next_use(self, row: int, at: int) -> int:
        """Return the number of operations from operation `at` to the buffer's next use.

        For a buffer without a further use, return twice the remaining lifetime: such a buffer never has to be
        copied back, so an eviction costs half.
        """
        accesses = self._accesses[row]
        found = bisect_left(accesses, at)
        if found < len(accesses):
            return accesses[found] - at
        if self._persistent[row]:
            return (accesses[0] if accesses else self._length) + self._length - at
        return 2 * max(self._end[row] - at, 0)


class IterationDetector:
    """Detector of the operations' period; an iteration may end at any position of the period."""

    def __init__(self) -> None:
        self._next_search = OPTIONS.first_period_search
        self._period = self._divergences = 0
        self._codes: dict[Any, int] = {}

    def ends(self, recording: RecordedIteration) -> bool:
        """Return whether a whole iteration has ended."""
        return len(recording.functions) == self._period

    def begins(self, recording: RecordedIteration) -> bool:
        """Return whether an iteration begins with the next operation; earlier operations belong to none."""
        if self._period or len(recording.functions) < self._next_search:
            return False
        self._next_search *= 2
        if len(recording) < OPTIONS.training_operations and (
            torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1
        ):
            return False
        for operations in (recording.functions, _with_uses(recording)):  # functions may repeat in each layer
            codes = [self._codes.setdefault(operation, len(self._codes)) for operation in operations]
            found = tail_period(codes, min_repeats=OPTIONS.period_repetitions)
            if found is not None and _same_twice(recording, found.period):
                self._period = found.period
                return True
        if len(recording) < OPTIONS.max_unperiodic_operations:
            return False
        self._next_search = OPTIONS.max_unperiodic_operations
        return True

    def record_end(self, *, diverged: bool) -> None:
        """Record whether an iteration diverged: the detected period may repeat within an iteration."""
        self._divergences = self._divergences + 1 if diverged else 0
        if self._divergences >= OPTIONS.period_divergences:
            self._period = self._divergences = 0


def _with_uses(recording: RecordedIteration) -> list[Any]:
    """Return each operation with the numbers of the shared storages (weights) that the operation uses.

    A shared storage is used several times and made by none of the operations. The last operation is left out,
    since later views still count as its uses.
    """
    touched = [code >> 1 for code in recording.access_codes]
    met = dict(recording.argument_births)
    made = set()
    for number, at, _ in recording.births:  # arguments are met before results are made
        if met.get(at, 0) > 0:
            met[at] -= 1
        else:
            made.add(number)
    several = {
        number for number, times in Counter(touched).items() if times >= OPTIONS.period_repetitions
    } - made
    ends = [*recording.first_access[1:], len(touched)]
    return [
        (function, *(number for number in touched[begin:end] if number in several))
        for function, begin, end in zip(recording.functions, recording.first_access, ends, strict=True)
    ][:-1]


def _same_twice(recording: RecordedIteration, period: int) -> bool:
    """Return whether the last two periods used the same older storages, unlike two equal layers."""
    end = len(recording)
    first = end - 2 * period
    new = {number for number, at, _ in recording.births if at >= first}
    used: tuple[set[int], set[int]] = set(), set()
    begin, middle = recording.first_access[first], recording.first_access[end - period]
    for half, codes in enumerate((recording.access_codes[begin:middle], recording.access_codes[middle:])):
        used[half].update(number for code in codes if (number := code >> 1) not in new)
    return len(used[0] & used[1]) > OPTIONS.period_shared_storages * max(len(used[0]), len(used[1]))

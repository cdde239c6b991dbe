"""A recorded iteration, operation by operation, and the step with durations made from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from solvers.swap import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mempool.torch.eager.schedule_actions import Program
    from mempool.torch.eager.storages import Held
    from mempool.torch.offload.engine import Engine


@dataclass
class Tape:
    """One recorded iteration. Times are operation numbers, 0 to K - 1.

    Attributes:
        functions: function of each operation; views and queries are not recorded.
        marks: by operation, the engine's mark at the beginning; under K, the mark at the end of the last
            operation. The durations of operations without marks are known from the plan's iteration.
        rooms: by operation, bytes of the workspace taken while running, in addition to the result, if any.
        there: storages alive at the beginning.
        born: (number, operation, bytes) of each new storage, in order; also of each storage that was met as
            an argument and that no operation made.
        met: by operation, the number of those arguments that no operation had made.
        touched: accesses in order, each as twice the number of the storage, plus one for a write: unlike
            tuples, integers give the garbage collector no work, which was a third of the cost of swapping.
        first: for each operation, the number of accesses before this operation.
        ended: by storage number, the number of operations begun when the storage was found dead.
    """

    functions: list[Any] = field(default_factory=list)
    marks: dict[int, Any] = field(default_factory=dict)
    rooms: dict[int, int] = field(default_factory=dict)
    there: list[Held] = field(default_factory=list)
    born: list[tuple[int, int, int]] = field(default_factory=list)
    met: dict[int, int] = field(default_factory=dict)
    touched: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    ended: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.functions)

    def agrees(self, other: Tape) -> bool:
        """Return whether another iteration has the same operations, with new buffers of the same sizes."""
        return self.functions == other.functions and [b[1:] for b in self.born] == [b[1:] for b in other.born]

    def accesses(self) -> Iterator[tuple[int, int, bool]]:
        """Yield (storage number, operation, whether written); accesses before operation 0 count as of 0."""
        operations = np.searchsorted(self.first, np.arange(len(self.touched)), "right") - 1
        for code, at in zip(self.touched, operations.clip(0).tolist(), strict=True):
            yield code >> 1, at, bool(code & 1)

    def seconds(self, engine: Engine, plan: Program | None) -> list[float]:
        """Return the duration of each operation, in seconds.

        An operation that is not between two marks has the duration known from the plan's iteration, or 0 if
        that plan is forgotten or was shorter.
        """
        seconds = [] if plan is None else plan.recorded.step.seconds.tolist()[: len(self)]
        seconds += [0.0] * (len(self) - len(seconds))
        for at, span in zip(self.marks, engine.seconds([*self.marks.values()]), strict=False):
            if at + 1 in self.marks:
                seconds[at] = span
        return seconds


@dataclass(frozen=True, eq=False)
class Recorded:
    """A tape as a `Step`.

    Attributes:
        step: the step; one row per storage alive at the beginning, then per born storage, then per workspace.
        numbers: for each row, the number of the storage; -1 for a workspace.
        born: row of each made storage, by (operation, place among the operation's results), and of each met
            storage, by (operation, -1, -2 and so on).
    """

    step: Step
    numbers: list[int]
    born: dict[tuple[int, int], int]


def recorded(tape: Tape, seconds: list[float]) -> Recorded:
    """Convert the tape of a whole iteration into a step on a circle.

    A storage alive at both the beginning and the end is persistent; if movable and never touched, the storage
    counts 0 bytes, since any need for room evicts such a storage and nobody reloads it. A storage left over
    from the previous iteration takes memory until freed; a storage left for the next iteration takes memory
    from the operation that made it.
    """
    k = len(tape)
    numbers = [held.number for held in tape.there] + [number for number, _, _ in tape.born]
    # An operation that raised is not recorded: storages that it met count as there after the last operation.
    start = [0] * len(tape.there) + [min(at, k - 1) for _, at, _ in tape.born]
    size = [held.room for held in tape.there] + [room for _, _, room in tape.born]
    end = [
        min(max(tape.ended.get(number, k), first + 1), k)
        for number, first in zip(numbers, start, strict=True)
    ]
    stays = [i < len(tape.there) and number not in tape.ended for i, number in enumerate(numbers)]
    row_of = {number: row for row, number in enumerate(numbers)}
    touched: dict[tuple[int, int], bool] = {}
    for number, at, wrote in tape.accesses():
        if (row := row_of.get(number)) is not None and start[row] <= at < end[row]:
            touched[row, at] = touched.get((row, at), False) or wrote
    used = {row for row, _ in touched}
    for row, held in enumerate(tape.there):
        if stays[row] and held.movable and row not in used:
            size[row] = 0
    for at, room in tape.rooms.items():
        if room > 0:
            touched[len(numbers), at] = True
            numbers.append(-1)
            start.append(at)
            end.append(at + 1)
            size.append(room)
            stays.append(False)
    accesses = sorted(touched)
    born = _places(tape)
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
        names=tuple(str(function) for function in tape.functions),
        circular=True,
    )
    return Recorded(step, numbers, born)


def _places(tape: Tape) -> dict[tuple[int, int], int]:
    """Return the row of each made or met storage by `Held.born`, in the order of appearance."""
    born: dict[tuple[int, int], int] = {}
    seen: dict[int, int] = {}
    for row, (_, at, _) in enumerate(tape.born, len(tape.there)):
        # An operation meets arguments before it makes anything.
        place, met = seen.get(at, 0), tape.met.get(at, 0)
        born[at, -1 - place if place < met else place - met] = row
        seen[at] = place + 1
    return born

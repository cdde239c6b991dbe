"""What one iteration did, operation by operation, and the step in time that it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from solvers.swap import Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mempool.torch.swapping.engine import Engine
    from mempool.torch.swapping.program import Program
    from mempool.torch.swapping.storages import Held


@dataclass
class Tape:
    """One iteration as it happened. Times are numbers of operations, 0 to K - 1.

    Attributes:
        functions: of each operation; views and questions are none.
        marks: by operation, the moment at which it began, and by their number that at which the last ended;
            of those without, what they took in the plan's iteration is known.
        rooms: by operation, bytes that it took for itself while it ran, beside what it returned, if any.
        there: what was there at the beginning.
        born: what was made, in order: number, operation and bytes; also what was met there, made by none.
        met: of an operation, how many of these it was given that nobody had made.
        touched: twice the number of a storage, and one more if it was written, in order: numbers, unlike
            tuples, give the garbage collector nothing to do, which was a third of what swapping cost.
        first: of each operation, how many were touched before it.
        ended: of a storage's number, how many operations had begun when it was found gone.
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
        """Whether another iteration did the same operations, and made buffers of the same sizes."""
        return self.functions == other.functions and [b[1:] for b in self.born] == [b[1:] for b in other.born]

    def accesses(self) -> Iterator[tuple[int, int, bool]]:
        """Number of the storage, operation, whether it wrote; what was touched before any is of the first."""
        operations = np.searchsorted(self.first, np.arange(len(self.touched)), "right") - 1
        for code, at in zip(self.touched, operations.clip(0).tolist(), strict=True):
            yield code >> 1, at, bool(code & 1)

    def seconds(self, engine: Engine, plan: Program | None) -> list[float]:
        """What each operation took; of those between no two marks, what it took in the plan's iteration.

        Nothing where that plan is forgotten, or was shorter.
        """
        seconds = [] if plan is None else plan.recorded.step.seconds.tolist()[: len(self)]
        seconds += [0.0] * (len(self) - len(seconds))
        for at, span in zip(self.marks, engine.seconds([*self.marks.values()]), strict=False):
            if at + 1 in self.marks:
                seconds[at] = span
        return seconds


@dataclass(frozen=True, eq=False)
class Recorded:
    """A tape as a step.

    Attributes:
        step: it; a row each for what was there, then for what was born, then for what operations took.
        numbers: of each row, the number of its storage; -1 for the last kind.
        born: of what was made, the row, by operation and place among what that made; of what was met, by
            operation and -1, -2 and so on.
    """

    step: Step
    numbers: list[int]
    born: dict[tuple[int, int], int]


def recorded(tape: Tape, seconds: list[float]) -> Recorded:
    """The tape of a whole iteration as a step on a circle.

    What is there at its beginning and at its end is there always; if nothing touches it and it may leave, it
    takes no memory, for it leaves when room is needed and nobody brings it. What is left from the iteration
    before, or left for the next, takes memory until it is gone, and from when it was made.
    """
    k = len(tape)
    numbers = [held.number for held in tape.there] + [number for number, _, _ in tape.born]
    # An operation that raised met what it was given, but is none: that was there after the last one.
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
    """The rows of what was made and met: `Held.born` of each, in the order in which they were seen."""
    born: dict[tuple[int, int], int] = {}
    seen: dict[int, int] = {}
    for row, (_, at, _) in enumerate(tape.born, len(tape.there)):
        # An operation is given what it meets before it makes anything.
        place, met = seen.get(at, 0), tape.met.get(at, 0)
        born[at, -1 - place if place < met else place - met] = row
        seen[at] = place + 1
    return born

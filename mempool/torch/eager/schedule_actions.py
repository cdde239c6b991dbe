"""A schedule as lists of actions before and after each operation."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from mempool.torch.eager.next_use import Uses

if TYPE_CHECKING:
    from mempool.torch.eager.recorded_iteration import Recorded, Tape
    from mempool.torch.offload.host_placement import HostCopies
    from solvers.swap import PlannedSchedule

#: Actions before an operation, in this order: free memory, then allocate memory and fill it.
RELEASE, FETCH = range(2)


class Line(NamedTuple):
    """Entry of a program for one operation."""

    function: Any  #: the operation
    before: tuple[tuple[int, int], ...]  #: (RELEASE or FETCH, row), in order
    after: tuple[tuple[int, int], ...]  #: (row that leaves, place of the copy on the host)
    gone: tuple[int, ...]  #: rows whose copies on the host are no longer needed
    made: tuple[int, ...]  #: rows of the operation's results, in order


@dataclass
class Program:
    """Actions around each operation of an iteration.

    Attributes:
        tape: the recorded iteration.
        recorded: the tape as a step.
        swap: the schedule, and the result of the schedule's replay.
        before: by operation, (RELEASE or FETCH, row), in order.
        copies: places of the copies on the host.
        after: by operation, (row that leaves, place of the copy on the host).
        gone: by operation, the rows whose copies on the host are no longer needed afterwards.
        rooms: bytes of each row.
        returns: row of the schedule, by (operation that uses the reloaded buffer, row of the buffer).
        changes: how often the program was changed after waits.
    """

    tape: Tape
    recorded: Recorded
    swap: PlannedSchedule
    copies: HostCopies
    before: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    after: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    gone: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    rooms: list[int] = field(default_factory=list)
    returns: dict[tuple[int, int], int] = field(default_factory=dict)
    changes: int = 0

    def __len__(self) -> int:
        return len(self.tape)

    @property
    def functions(self) -> list[Any]:
        """Return the function of each operation."""
        return self.tape.functions

    def away(self, at: int) -> list[int]:
        """Return the rows that are offloaded, or about to leave, before an operation."""
        moves, k = self.swap.schedule, len(self)
        now = (moves.out < at) & (at <= moves.fetch)
        found: list[int] = moves.buffer[now | (moves.out < at + k) & (at + k <= moves.fetch)].tolist()
        return found

    @cached_property
    def always(self) -> list[tuple[int, int]]:
        """Return (row, storage number) of each persistent storage."""
        stays = self.recorded.step.persistent.nonzero()[0].tolist()
        return [(row, self.recorded.numbers[row]) for row in stays]

    @cached_property
    def lines(self) -> list[Line]:
        """Return the entries of all operations."""
        made: dict[int, list[int]] = defaultdict(list)
        for (at, place), row in sorted(self.recorded.born.items()):
            if place >= 0:
                made[at].append(row)
        return [
            Line(
                function,
                tuple(self.before.get(at, ())),
                tuple(self.after.get(at, ())),
                tuple(self.gone.get(at, ())),
                tuple(made[at]),
            )
            for at, function in enumerate(self.functions)
        ]

    @cached_property
    def uses(self) -> Uses:
        """Return the lookup of each row's next use."""
        return Uses(self.recorded.step)


def program_of(
    tape: Tape, recorded: Recorded, swap: PlannedSchedule, copies: HostCopies, changes: int = 0
) -> Program:
    """Convert a schedule and the copies on the host to a program that was changed `changes` times."""
    k, moves = len(tape), swap.schedule
    made = Program(tape, recorded, swap, copies, rooms=recorded.step.size.tolist(), changes=changes)
    for row in moves.release.argsort(kind="stable").tolist():
        buffer = int(moves.buffer[row])
        made.after[int(moves.out[row]) % k].append((buffer, int(copies.at[row])))
        made.before[int(moves.release[row]) % k].append((RELEASE, buffer))
    for row in moves.use.argsort(kind="stable").tolist():
        buffer = int(moves.buffer[row])
        made.before[int(moves.fetch[row]) % k].append((FETCH, buffer))
        made.returns[int(moves.use[row]) % k, buffer] = row
    for last, row in zip(copies.last.tolist(), copies.of.tolist(), strict=True):
        made.gone[last].append(row)
    for actions in made.before.values():
        actions.sort(key=lambda action: action[0])
    return made

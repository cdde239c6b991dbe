"""A schedule as what is to be done before and after each operation."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from mempool.torch.swapping.uses import Uses

if TYPE_CHECKING:
    from mempool.torch.swapping.host_copies import HostCopies
    from mempool.torch.swapping.tape import Recorded, Tape
    from solvers.swap import Swap

#: Before an operation, in this order: give memory back, take memory and fill it.
RELEASE, FETCH = range(2)


class Line(NamedTuple):
    """One operation of a program."""

    function: Any  #: it
    before: tuple[tuple[int, int], ...]  #: (RELEASE or FETCH, row), in order
    after: tuple[tuple[int, int], ...]  #: rows that leave, and where on the host their copies lie
    gone: tuple[int, ...]  #: rows whose copies on the host nothing needs any more
    made: tuple[int, ...]  #: rows of what it makes, in order


@dataclass
class Program:
    """What to do around each operation of an iteration.

    Attributes:
        tape: the iteration that it was made from.
        recorded: that as a step.
        swap: the schedule and what the replay says of it.
        before: of an operation, (RELEASE or FETCH, row), in order.
        copies: on the host.
        after: of an operation, the rows that leave, and where on the host their copies lie.
        gone: of an operation, the rows whose copies on the host nothing needs after it.
        rooms: bytes of each row.
        returns: rows of the schedule, by operation that uses what comes back, and its row.
        changes: how often it was changed by what was waited for.
    """

    tape: Tape
    recorded: Recorded
    swap: Swap
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
        """Of each operation."""
        return self.tape.functions

    def away(self, at: int) -> list[int]:
        """Rows that are not here, or not to stay, before an operation."""
        moves, k = self.swap.schedule, len(self)
        now = (moves.out < at) & (at <= moves.fetch)
        found: list[int] = moves.buffer[now | (moves.out < at + k) & (at + k <= moves.fetch)].tolist()
        return found

    @cached_property
    def always(self) -> list[tuple[int, int]]:
        """Rows of what is there in every iteration, and the numbers of their storages."""
        stays = self.recorded.step.persistent.nonzero()[0].tolist()
        return [(row, self.recorded.numbers[row]) for row in stays]

    @cached_property
    def lines(self) -> list[Line]:
        """All of that, by operation."""
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
        """When each row is used next."""
        return Uses(self.recorded.step)


def program_of(tape: Tape, recorded: Recorded, swap: Swap, copies: HostCopies, changes: int = 0) -> Program:
    """The program of a schedule and its copies on the host, which was changed so often."""
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

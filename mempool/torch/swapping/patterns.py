"""The kinds of iteration that a program does in turn, and a plan for each."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mempool.torch.swapping.tape import Tape

if TYPE_CHECKING:
    from mempool.torch.swapping.needs import Need
    from mempool.torch.swapping.program import Program

#: Plans that are kept, and iterations after which one that was not followed may be given up for another.
_MOST, _STALE = 4, 64
#: Iterations without a plan that are remembered, since one of their kind may come again.
_SEEN = 8
#: Iterations from whose order the next one is foretold.
_REMEMBERED = 64


@dataclass(eq=False)
class Pattern:
    """One kind of iteration.

    Attributes:
        program: its moves.
        followed: whether an iteration did.
        used: number of the last iteration that was of this kind.
        needs: of each operation, itself, bytes of the tensors that it was given, or where it takes none its
            arguments, and what it then needs.
        limit_bytes: what its moves were planned for.
        lessened: how often they were planned anew for less.
        arrived: of the last iteration that followed them, rows of the schedule and their copies back.
    """

    program: Program
    followed: bool = False
    used: int = 0
    limit_bytes: int = 0
    lessened: int = 0
    needs: list[tuple[Any, Any, Need]] = field(default_factory=list)
    arrived: list[tuple[int, Any]] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether the moves hold what they were planned for; else more has to leave than they let leave."""
        return self.program.swap.limit_bytes <= self.limit_bytes


class Patterns:
    """Those that recur: training and evaluation, steps that accumulate, batches of several shapes."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._kept: list[Pattern] = []
        self._seen: deque[Tape] = deque(maxlen=_SEEN)
        self._order: deque[Pattern | None] = deque(maxlen=_REMEMBERED)
        self._now = 0

    def __len__(self) -> int:
        return len(self._kept)

    def was(self, pattern: Pattern | None) -> None:
        """An iteration has ended that was of a pattern, or of none."""
        self._now += 1
        self._order.append(pattern)
        if pattern is not None:
            pattern.used = self._now

    def recurs(self, tape: Tape) -> bool:
        """Whether an iteration that followed no plan is of a kind that was seen lately, and may have one."""
        if any(tape.agrees(kept.program.tape) for kept in self._kept):
            return False
        if not any(tape.agrees(seen) for seen in self._seen):
            self._seen.append(Tape(functions=tape.functions, born=tape.born))
            return False
        return len(self._kept) < _MOST or self._now - self._oldest().used >= _STALE

    def add(self, program: Program) -> Pattern:
        """Keep the plan that was made of the iteration that has just been; another may have to go."""
        if len(self._kept) >= _MOST:
            self.drop(self._oldest())
        self._kept.append(made := Pattern(program))
        self._seen = deque((seen for seen in self._seen if not seen.agrees(program.tape)), maxlen=_SEEN)
        return made

    def drop(self, pattern: Pattern) -> None:
        """Forget one."""
        self._kept.remove(pattern)
        self._order = deque((None if one is pattern else one for one in self._order), maxlen=_REMEMBERED)

    def next(self) -> Pattern | None:
        """What comes next: what came after the longest row of iterations that ended like the last ones.

        Where nothing like it was, the one that was last.
        """
        order = list(self._order)
        best, found = 0, None
        for at in range(len(order) - 1, 0, -1):  # of two rows of one length, the later
            if order[at] is None or order[max(at - 1 - best, 0)] is not order[-1 - best]:
                continue
            length = 0
            while length < at and order[at - 1 - length] is order[-1 - length]:
                length += 1
            if length > best:
                best, found = length, order[at]
            if length == at:  # those before it are shorter
                break
        return found or max(self._kept, key=lambda one: one.used, default=None)

    def like(self, tape: Tape, func: Any, but: Pattern | None) -> Pattern | None:
        """Another one that began as this iteration did, and whose next operation is this; None: any."""
        at = len(tape)
        born = [(when, room) for _, when, room in tape.born]
        for one in self._kept:
            other = one.program.tape
            if (
                one is not but
                and len(other) > at
                and (func is None or other.functions[at] is func)
                and other.functions[:at] == tape.functions
                and [(when, room) for _, when, room in other.born[: len(born)]] == born
            ):
                return one
        return None

    def _oldest(self) -> Pattern:
        return min(self._kept, key=lambda one: one.used)

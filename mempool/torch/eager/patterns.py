"""Recurring iterations of a program, and a plan for each."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mempool.torch.eager.recorded_iteration import Tape

if TYPE_CHECKING:
    from mempool.torch.eager.op_footprints import Need
    from mempool.torch.eager.schedule_actions import Program

#: Maximum number of plans, and iterations without use after which a plan may be replaced.
_MOST, _STALE = 4, 64
#: Number of unplanned iterations that are remembered, to detect their recurrence.
_SEEN = 8
#: Number of past iterations from whose order the next is predicted.
_REMEMBERED = 64


@dataclass(eq=False)
class Pattern:
    """A recurring iteration and the plan for it.

    Attributes:
        program: offload schedule, by operation.
        followed: whether an iteration followed the schedule.
        used: number of the last iteration of this pattern.
        needs: for each operation, the operation, the bytes of its tensor arguments (or the arguments
            themselves, if none is a tensor), and the footprint.
        limit_bytes: limit for which the moves were planned, bytes.
        lessened: how often the moves were replanned for a lower limit.
        arrived: rows of the schedule and their reloads, of the last iteration that followed the schedule.
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
        """Return whether the moves hold the planned limit; if not, more is evicted than planned."""
        return self.program.swap.limit_bytes <= self.limit_bytes


class Patterns:
    """Registry of recurring iterations: training, evaluation, accumulation, batches of several shapes."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all patterns and iterations."""
        self._kept: list[Pattern] = []
        self._seen: deque[Tape] = deque(maxlen=_SEEN)
        self._order: deque[Pattern | None] = deque(maxlen=_REMEMBERED)
        self._now = 0

    def __len__(self) -> int:
        return len(self._kept)

    def was(self, pattern: Pattern | None) -> None:
        """Record the end of an iteration, with the iteration's pattern or None."""
        self._now += 1
        self._order.append(pattern)
        if pattern is not None:
            pattern.used = self._now

    def recurs(self, tape: Tape) -> bool:
        """Return whether an unplanned iteration matches a recent one, and another plan can be kept.

        A tape without a match is remembered.
        """
        if any(tape.agrees(kept.program.tape) for kept in self._kept):
            return False
        if not any(tape.agrees(seen) for seen in self._seen):
            self._seen.append(Tape(functions=tape.functions, born=tape.born))
            return False
        return len(self._kept) < _MOST or self._now - self._oldest().used >= _STALE

    def add(self, program: Program) -> Pattern:
        """Add the plan made from the last iteration; a full registry drops the least recently used one."""
        if len(self._kept) >= _MOST:
            self.drop(self._oldest())
        self._kept.append(made := Pattern(program))
        self._seen = deque((seen for seen in self._seen if not seen.agrees(program.tape)), maxlen=_SEEN)
        return made

    def drop(self, pattern: Pattern) -> None:
        """Remove a pattern."""
        self._kept.remove(pattern)
        self._order = deque((None if one is pattern else one for one in self._order), maxlen=_REMEMBERED)

    def next(self) -> Pattern | None:
        """Predict the next pattern: the successor of the longest past run that ends like the last iterations.

        If no run matches, return the most recently used pattern.
        """
        order = list(self._order)
        best, found = 0, None
        for at in range(len(order) - 1, 0, -1):  # of two runs of equal length, the later
            if order[at] is None or order[max(at - 1 - best, 0)] is not order[-1 - best]:
                continue
            length = 0
            while length < at and order[at - 1 - length] is order[-1 - length]:
                length += 1
            if length > best:
                best, found = length, order[at]
            if length == at:  # all earlier runs are shorter
                break
        return found or max(self._kept, key=lambda one: one.used, default=None)

    def like(self, tape: Tape, func: Any, but: Pattern | None) -> Pattern | None:
        """Return another pattern, not `but`, that began like this iteration and continues with `func`.

        With None for `func`, any next operation matches.
        """
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

"""Detection of iterations in a program that marks none, such as an inference loop."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from traces.iterations.cycles import tail_period

if TYPE_CHECKING:
    from mempool.torch.eager.recorded_iteration import Tape

#: Number of operations before the first search, doubled after each search, and the most that a tape keeps
#: without a period.
_FIRST, _MOST = 64, 1 << 15
#: Below this number of operations, programs that look like training are left to the marks of optimizer steps.
_PATIENT = 1 << 12
#: Repetitions needed to accept a period, and consecutive diverging iterations that disprove it.
_TIMES, _ODD = 3, 3
#: Share of the storages used in one iteration that the next iteration must use too.
_SAME = 0.8


class Repeats:
    """Detector of the operations' period; any place in the period serves as the iteration's end."""

    def __init__(self) -> None:
        self._look = _FIRST
        self._period = self._odd = 0
        self._codes: dict[Any, int] = {}

    def ends(self, tape: Tape) -> bool:
        """Return whether a whole iteration has ended."""
        return len(tape.functions) == self._period

    def begins(self, tape: Tape) -> bool:
        """Return whether an iteration begins with the next operation, so that earlier ones belong to none."""
        if self._period or len(tape.functions) < self._look:
            return False
        self._look *= 2
        if len(tape) < _PATIENT and (torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1):
            return False
        for what in (tape.functions, _with_uses(tape)):  # functions may repeat per layer
            codes = [self._codes.setdefault(one, len(self._codes)) for one in what]
            found = tail_period(codes, min_repeats=_TIMES)
            if found is not None and _same_twice(tape, found.period):
                self._period = found.period
                return True
        if len(tape) < _MOST:
            return False
        self._look = _MOST
        return True

    def was(self, *, odd: bool) -> None:
        """Record whether an iteration diverged: the period may be a repetition within the iteration."""
        self._odd = self._odd + 1 if odd else 0
        if self._odd >= _ODD:
            self._period = self._odd = 0


def _with_uses(tape: Tape) -> list[Any]:
    """Return each operation with the numbers of the shared storages (weights) that the operation uses.

    Shared storages are used several times and made by none of the operations. The last operation is left out:
    views made after an operation count as uses by that operation, and may still follow.
    """
    touched = [code >> 1 for code in tape.touched]
    met = dict(tape.met)
    made = set()
    for number, at, _ in tape.born:  # arguments are met before results are made
        if met.get(at, 0) > 0:
            met[at] -= 1
        else:
            made.add(number)
    several = {number for number, times in Counter(touched).items() if times >= _TIMES} - made
    ends = [*tape.first[1:], len(touched)]
    return [
        (function, *(number for number in touched[begin:end] if number in several))
        for function, begin, end in zip(tape.functions, tape.first, ends, strict=True)
    ][:-1]


def _same_twice(tape: Tape, period: int) -> bool:
    """Return whether the last two periods used the same older storages: layers that are alike do not."""
    end = len(tape)
    first = end - 2 * period
    new = {number for number, at, _ in tape.born if at >= first}
    used: tuple[set[int], set[int]] = set(), set()
    begin, middle = tape.first[first], tape.first[end - period]
    for half, codes in enumerate((tape.touched[begin:middle], tape.touched[middle:])):
        used[half].update(number for code in codes if (number := code >> 1) not in new)
    return len(used[0] & used[1]) > _SAME * max(len(used[0]), len(used[1]))

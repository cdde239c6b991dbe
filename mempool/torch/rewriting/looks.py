"""What is beside graphs while they run, looked at in the steps after something was compiled."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from mempool.torch.rewriting.counted import HighWater
from mempool.torch.rewriting.present import Present

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

#: In how many steps runs are looked at after a graph has been compiled, how many runs at most, and how often
#: a graph is compiled anew for what was seen.
_STEPS, _LOOKS, _AGAIN = 3, 4096, 4


@dataclass(frozen=True)
class Moment:
    """What is beside a run of a graph when it begins; bytes.

    Attributes:
        others: what other graphs hold, and gradients.
        parameters: and buffers that the graph does not read.
        own: what other runs of the same graph hold besides what they keep for their backward runs.
        waiting: what they keep.
        runs: how many of them keep anything.
        kept: what each was thought to keep.
    """

    others: int = 0
    parameters: int = 0
    own: int = 0
    waiting: int = 0
    runs: int = 0
    kept: int = 0

    def bytes(self, kept: int | None = None) -> int:
        """All of it, if each run kept so much."""
        more = 0 if kept is None else self.runs * (kept - self.kept)
        return self.others + self.parameters + self.own + max(self.waiting + more, 0)


NO_MOMENT = Moment()


@dataclass
class Seen:
    """What was beside the runs of a graph.

    Attributes:
        gradients_stay: whether somebody else has what its backward pass was given until that ends.
        between: the most bytes that somebody took for a while between its passes.
        state: the most bytes of optimizers' state.
    """

    gradients_stay: bool = False
    between: int = 0
    state: int = 0
    _most: dict[tuple[bool, int], Moment] = field(default_factory=dict)

    def note(self, moment: Moment, *, backward: bool) -> None:
        """One more run has begun. Of those with as many others only that with most counts."""
        key = backward, moment.runs
        if moment.bytes() > self._most.get(key, NO_MOMENT).bytes():
            self._most[key] = moment

    @property
    def runs(self) -> int:
        """How many runs there were at a time beside one."""
        return max((moment.runs for moment in self._most.values()), default=0)

    @property
    def kept(self) -> int:
        """The most that a run was thought to keep."""
        return max((moment.kept for moment in self._most.values()), default=0)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever beside a run."""
        return not self._most

    def most(self, kept: int | None = None, *, backward: bool) -> Moment:
        """What is beside a run when there is most, if each kept so much."""
        found = (moment for (one, _), moment in self._most.items() if one == backward)
        return max(found, key=lambda moment: moment.bytes(kept), default=NO_MOMENT)

    def bytes(self, kept: int | None = None, *, backward: bool) -> int:
        """How much that is."""
        return self.most(kept, backward=backward).bytes(kept)


NOTHING_SEEN = Seen()


@dataclass(eq=False)
class Looks:
    """At the runs of the graphs of one call of `torch.compile`.

    Attributes:
        present: what the graphs hold.
        seen: by the number of a graph, what was beside it since it was compiled.
        known: the same when it was found to be more than was counted.
        water: what somebody counts meanwhile.
    """

    present: Present = field(default_factory=Present)
    seen: dict[int, Seen] = field(default_factory=dict)
    known: dict[int, Seen] = field(default_factory=dict)
    water: HighWater = field(default_factory=HighWater)
    _left: int = 0
    _steps: int = 0
    _numbers: dict[tuple[int, Hashable], int] = field(default_factory=dict)
    _codes: dict[int, Hashable] = field(default_factory=dict)
    _followed: set[int] = field(default_factory=set)
    _stale: dict[int, bool] = field(default_factory=dict)  # whether what was seen counts then
    _anew: Counter[int] = field(default_factory=Counter)
    _went_back: bool = False
    _compiled: bool = False
    _queued: bool = False

    def number(self, code: Hashable, given: Iterable[Any]) -> int:
        """Of a graph that is about to be compiled: one for the code of a function and sizes of parameters.

        Args:
            code: of the function that it is of.
            given: to it.
        """
        shapes = tuple(one.shape for one in given if isinstance(one, torch.nn.Parameter) and not is_lazy(one))
        number = self._numbers.setdefault((id(code), shapes), len(self._numbers))
        self._codes[number] = code
        if self._left == 0 and not self.seen.get(number, NOTHING_SEEN).is_empty:
            self.known[number] = self.seen[number]
        self._see_anew(number)
        self._open()
        return number

    def _see_anew(self, number: int) -> None:
        """What was seen of a graph is known, or there is nothing yet: what comes is seen by itself."""
        if self.seen.get(number) is self.known.get(number):
            self.seen[number] = Seen()

    def function(self, number: int) -> str:
        """The name of the function that a graph is of; "" of one that is none's."""
        code = self._codes.get(number)
        return getattr(code, "co_qualname", getattr(code, "co_name", ""))

    def _open(self) -> None:
        """Runs are looked at from now on, for some steps."""
        if self._left == 0:  # what is there in this step nobody has looked at
            self.present.step()
            self._went_back = False
        self._left, self._steps, self._compiled = _LOOKS, _STEPS, True
        self.water.opens()

    def open_if_more(self, limit: int) -> None:
        """Look at runs again where there was more than ever since nobody looks, and more than the limit."""
        if self.water.rises(limit):
            for number in self.seen:
                self._see_anew(number)
            self._open()

    @property
    def wanted(self) -> bool:
        """Whether to look at a run that begins."""
        return self._left > 0

    def begins(self, *, backward: bool) -> None:
        """A run that is looked at begins.

        It is the next step's if it goes forward after others went back, none waits to do so, and it makes
        nothing again for one that is doing so.
        """
        self._left -= 1
        if backward and self._compiled:
            if self.present.has_several:
                gc.collect()  # see `Present.beside`
            self._compiled = False
        if not backward and not _goes_back():
            self._queued = False
            if self._went_back and not self.present.waits():
                self._steps -= 1
                self.present.step()
                self._went_back = False
                self.water.steps()
                if self._steps <= 0:
                    self._left = 0
                    self.water.closes()
        self._went_back |= backward

    def ends(self) -> None:
        """A backward run has ended.

        When the whole backward pass has, what is to be compiled anew is forgotten; not before, since what is
        made again in it must be made by the same graph.
        """
        if self._stale and not _goes_back():  # as where it is compiled as a whole
            self._is_over()
        elif self._stale and not self._queued:
            torch.autograd.Variable._execution_engine.queue_callback(self._is_over)
            self._queued = True

    def _is_over(self) -> None:
        self._queued = False
        while self._stale and not self.present.waits():
            number, counts = self._stale.popitem()
            if counts:
                self._anew[number] += 1
            else:
                self.known.pop(number, None)
                self.seen[number] = Seen()
            self._compile_anew(number)

    def stale(self, number: int) -> None:
        """More is beside a graph than was counted: compile it anew, when the step is over."""
        if self._stale.get(number, True) and self.known.get(number) is not self.seen[number]:
            self.known[number] = self.seen[number]
            self._stale[number] = True

    def waiting(self) -> list[int]:
        """Graphs that have kept something for their backward runs, and can be compiled anew."""
        return [number for number in self.present.waiting() if self._codes[number] is not None]

    def is_followed(self, number: int) -> bool:
        """Whether a graph has others after it, though nothing in its function tells."""
        return number in self._followed

    def follow(self, earlier: Iterable[int], number: int) -> None:
        """A graph has others after it, which kept what they might, and so has too little left.

        All are compiled anew when the step is over, as if nothing had been seen: they hold less then.
        """
        self._followed.update(earlier)
        self._stale |= dict.fromkeys([*earlier, number], False)

    def _compile_anew(self, number: int) -> None:
        from mempool.torch.rewriting.frames import compile_anew

        code = self._codes[number]
        if self._anew[number] > _AGAIN or not compile_anew(code):
            seen = self.known.get(number, NOTHING_SEEN)
            name = self.function(number) or "a function"
            warnings.warn(
                f"beside a graph of {name} are {seen.bytes(backward=False)} bytes in the forward and "
                f"{seen.bytes(backward=True)} in the backward pass, and {seen.between} for a while between "
                "them, more than was counted",
                stacklevel=2,
            )


def _goes_back() -> bool:
    """Whether a backward pass is what runs now, in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)

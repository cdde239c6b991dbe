"""Observations of the memory outside running graphs, made in the steps after a compilation."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from mempool.torch.compiled.external_memory import Present
from mempool.torch.compiled.memory_counters import HighWater

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

#: `_STEPS`: steps that are observed after a compilation. `_LOOKS`: most observed runs. `_AGAIN`: most
#: recompilations of a graph because of observations.
_STEPS, _LOOKS, _AGAIN = 3, 4096, 4


@dataclass(frozen=True)
class Moment:
    """Memory outside a run of a graph when the run begins, in bytes.

    Attributes:
        others: bytes held by other graphs, and gradients.
        parameters: parameters and buffers that the graph does not read.
        own: bytes held by other runs of the same graph, without those kept for their backward runs.
        waiting: bytes that these runs keep for their backward runs.
        runs: number of these runs that keep anything.
        kept: bytes that each run was predicted to keep.
    """

    others: int = 0
    parameters: int = 0
    own: int = 0
    waiting: int = 0
    runs: int = 0
    kept: int = 0

    def bytes(self, kept: int | None = None) -> int:
        """Return the total; with `kept`, under the assumption that each run keeps that many bytes."""
        more = 0 if kept is None else self.runs * (kept - self.kept)
        return self.others + self.parameters + self.own + max(self.waiting + more, 0)


NO_MOMENT = Moment()


@dataclass
class Seen:
    """Memory observed outside the runs of a graph.

    Attributes:
        gradients_stay: true if other code holds the gradients given to the backward pass until the pass ends.
        between: most bytes that other code used temporarily between the two passes.
        state: most bytes of the optimizers' state.
    """

    gradients_stay: bool = False
    between: int = 0
    state: int = 0
    _most: dict[tuple[bool, int], Moment] = field(default_factory=dict)

    def note(self, moment: Moment, *, backward: bool) -> None:
        """Record a starting run; of the moments with equally many other runs, only the largest is kept."""
        key = backward, moment.runs
        if moment.bytes() > self._most.get(key, NO_MOMENT).bytes():
            self._most[key] = moment

    @property
    def runs(self) -> int:
        """Return the largest number of other runs at the same time."""
        return max((moment.runs for moment in self._most.values()), default=0)

    @property
    def kept(self) -> int:
        """Return the most bytes that a run was predicted to keep."""
        return max((moment.kept for moment in self._most.values()), default=0)

    @property
    def is_empty(self) -> bool:
        """Return true if no memory was ever observed outside a run."""
        return not self._most

    def most(self, kept: int | None = None, *, backward: bool) -> Moment:
        """Return the moment with the most outside bytes in one pass, if each run keeps `kept` bytes."""
        found = (moment for (one, _), moment in self._most.items() if one == backward)
        return max(found, key=lambda moment: moment.bytes(kept), default=NO_MOMENT)

    def bytes(self, kept: int | None = None, *, backward: bool) -> int:
        """Return the bytes of the largest moment in one of the passes."""
        return self.most(kept, backward=backward).bytes(kept)


NOTHING_SEEN = Seen()


@dataclass(eq=False)
class Looks:
    """Observer of the runs of all graphs of one call of `torch.compile`.

    Attributes:
        present: the memory that the graphs hold.
        seen: by graph number, the observations since the compilation.
        known: by graph number, earlier observations that exceeded the assumed bytes.
        water: the high-water mark of the allocator.
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
    _stale: dict[int, bool] = field(default_factory=dict)  # true: recompile with the observations
    _anew: Counter[int] = field(default_factory=Counter)
    _went_back: bool = False
    _compiled: bool = False
    _queued: bool = False

    def number(self, code: Hashable, given: Iterable[Any]) -> int:
        """Return the number of a graph about to be compiled: one per code object and parameter shapes.

        Args:
            code: the code of the function.
            given: the inputs of the graph.
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
        """Start a new observation if the present one is already in `known`, or if there is none."""
        if self.seen.get(number) is self.known.get(number):
            self.seen[number] = Seen()

    def function(self, number: int) -> str:
        """Return the name of the function of a graph; "" if the graph belongs to no function."""
        code = self._codes.get(number)
        return getattr(code, "co_qualname", getattr(code, "co_name", ""))

    def _open(self) -> None:
        """Start the observation of runs for `_STEPS` steps."""
        if self._left == 0:  # nothing was observed so far in this step
            self.present.step()
            self._went_back = False
        self._left, self._steps, self._compiled = _LOOKS, _STEPS, True
        self.water.opens()

    def open_if_more(self, limit: int) -> None:
        """Restart the observation if the high-water mark rose above the limit since the observation ended."""
        if self.water.rises(limit):
            for number in self.seen:
                self._see_anew(number)
            self._open()

    @property
    def wanted(self) -> bool:
        """Return true if a starting run shall be observed."""
        return self._left > 0

    def begins(self, *, backward: bool) -> None:
        """Count an observed run that begins, and detect the start of a new step.

        A forward run starts a new step if other runs have gone backward since, no run waits for a backward
        pass, and the run is not a recomputation inside a backward pass.
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
        """End a backward run.

        Once the whole backward pass is over, discard the compiled code of stale graphs. Not before, since the
        same graph must do the recomputations of that pass.
        """
        if self._stale and not _goes_back():  # such as where the backward pass is compiled as a whole
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
        """Mark a graph for recompilation after the step, because more memory is in use than was assumed."""
        if self._stale.get(number, True) and self.known.get(number) is not self.seen[number]:
            self.known[number] = self.seen[number]
            self._stale[number] = True

    def waiting(self) -> list[int]:
        """Return the graphs that keep memory for a backward run and can be recompiled."""
        return [number for number in self.present.waiting() if self._codes[number] is not None]

    def is_followed(self, number: int) -> bool:
        """Return true if other graphs follow a graph though the function itself does not show that."""
        return number in self._followed

    def follow(self, earlier: Iterable[int], number: int) -> None:
        """Note that a graph follows earlier graphs, which kept too much and left too little.

        All of them are recompiled after the step, without their observations: they hold less then.
        """
        self._followed.update(earlier)
        self._stale |= dict.fromkeys([*earlier, number], False)

    def _compile_anew(self, number: int) -> None:
        from mempool.torch.compiled.dynamo_frames import compile_anew

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
    """Return true if this thread is running a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)

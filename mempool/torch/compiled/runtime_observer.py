"""Observations of the memory outside running graphs, made in the steps after a compilation."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from mempool.torch.compiled.external_memory import LiveMemory
from mempool.torch.compiled.options import TUNABLES
from mempool.torch.compiled.records import NO_OBSERVATIONS, Observations

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable


class AllocatedBytes(NamedTuple):
    """Present and peak bytes of this process's tensors on the device."""

    now: int
    most: int


def allocated_bytes() -> AllocatedBytes | None:
    """Return the present and peak bytes; None if no allocator counts, such as on a CPU without a pool."""
    from mempool.torch import installed

    pool = installed()
    if pool is not None:
        requested = pool.client.stats()["requested"]
        return AllocatedBytes(int(requested["current"]), int(requested["peak"]))
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # a foreign allocator counts nothing
            all_bytes = torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]
            return AllocatedBytes(int(all_bytes["current"]), int(all_bytes["peak"]))
    return None


class RunEnd(NamedTuple):
    """The bytes counted when a run of a graph ended."""

    number: int
    backward: bool
    allocated_bytes: AllocatedBytes


@dataclass(eq=False)
class HighWaterMark:
    """The allocator's high-water mark while runs are observed and afterwards.

    The mark belongs to the program and is never reset here, so only a rise of the mark is visible.

    Attributes:
        most: peak bytes in the steps after the first observed step; 0 if no allocator counts.
    """

    most: int = 0
    _first: int | None = None
    _known: int = 0
    _ended: RunEnd | None = None

    def start(self) -> None:
        """Start observing, or restart after another compilation."""
        self.most, self._first, self._ended = 0, None, None

    def before_run(self, number: int, *, backward: bool) -> tuple[int, int] | None:
        """Record that a run of a graph begins.

        Returns:
            If the mark rose since the last run: the number of the graph that waited for a backward run, and
            the peak bytes in addition to the bytes in use before. Otherwise None.
        """
        there, ended, self._ended = allocated_bytes(), self._ended, None
        if there is None:
            return None
        if self._first is not None:
            self.most = max(self.most, there.now, there.most if there.most > self._first else 0)
        if ended is None or there.most <= ended.allocated_bytes.most or (ended.backward and not backward):
            return None  # the time from a backward to a forward run lies between two steps
        return number if ended.backward else ended.number, there.most - ended.allocated_bytes.now

    def after_run(self, number: int, *, backward: bool) -> None:
        """Record that a run has ended."""
        there = allocated_bytes()
        self._ended = None if there is None else RunEnd(number, backward, there)

    def end_step(self) -> None:
        """Record that an observed step has ended."""
        if self._first is None and (there := allocated_bytes()) is not None:
            self._first = there.most

    def stop(self) -> None:
        """Stop observing runs."""
        self._known = 0 if (there := allocated_bytes()) is None else there.most

    def has_risen(self, limit: int) -> bool:
        """Return true once for each rise of the mark above a limit since the observation ended.

        Small rises are ignored, such as those of a program that slowly collects data.
        """
        there = allocated_bytes()
        if there is None or there.most <= max(limit, self._known + int(limit * TUNABLES.ignored_rise)):
            return False
        self._known = there.most
        return True


@dataclass(eq=False)
class RuntimeObserver:
    """Observer of the runs of all graphs of one call of `torch.compile`.

    Attributes:
        live_memory: the memory that the graphs hold.
        observed: by graph number, the observations since the compilation.
        known: by graph number, earlier observations that exceeded the assumed bytes.
        high_water: the high-water mark of the allocator.
    """

    live_memory: LiveMemory = field(default_factory=LiveMemory)
    observed: dict[int, Observations] = field(default_factory=dict)
    known: dict[int, Observations] = field(default_factory=dict)
    high_water: HighWaterMark = field(default_factory=HighWaterMark)
    _left: int = 0
    _steps: int = 0
    _numbers: dict[tuple[int, Hashable], int] = field(default_factory=dict)
    _codes: dict[int, Hashable] = field(default_factory=dict)
    _with_successor: set[int] = field(default_factory=set)
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
        shapes = tuple(
            value.shape for value in given if isinstance(value, torch.nn.Parameter) and not is_lazy(value)
        )
        number = self._numbers.setdefault((id(code), shapes), len(self._numbers))
        self._codes[number] = code
        if self._left == 0 and not self.observed.get(number, NO_OBSERVATIONS).is_empty:
            self.known[number] = self.observed[number]
        self._restart_observation(number)
        self._open()
        return number

    def _restart_observation(self, number: int) -> None:
        """Start a new observation if the present one is already in `known`, or if there is none."""
        if self.observed.get(number) is self.known.get(number):
            self.observed[number] = Observations()

    def function(self, number: int) -> str:
        """Return the name of a graph's function; "" without a function."""
        code = self._codes.get(number)
        return getattr(code, "co_qualname", getattr(code, "co_name", ""))

    def _open(self) -> None:
        """Start the observation of runs for a few steps."""
        if self._left == 0:  # nothing was observed so far in this step
            self.live_memory.step()
            self._went_back = False
        self._left, self._steps, self._compiled = TUNABLES.observed_runs, TUNABLES.observed_steps, True
        self.high_water.start()

    def reopen_on_excess(self, limit: int) -> None:
        """Restart the observation if the high-water mark rose above the limit since the observation ended."""
        if self.high_water.has_risen(limit):
            for number in self.observed:
                self._restart_observation(number)
            self._open()

    @property
    def is_open(self) -> bool:
        """Return true if a starting run is to be observed."""
        return self._left > 0

    def before_run(self, *, backward: bool) -> None:
        """Count an observed run that begins, and detect the start of a new step.

        A forward run starts a new step if a backward run came before, no run waits for a backward pass, and
        the run is not a recomputation inside a backward pass.
        """
        self._left -= 1
        if backward and self._compiled:
            if self.live_memory.has_several:
                gc.collect()  # see `LiveMemory.external`
            self._compiled = False
        if not backward and not _in_backward_pass():
            self._queued = False
            if self._went_back and not self.live_memory.has_waiting_runs():
                self._steps -= 1
                self.live_memory.step()
                self._went_back = False
                self.high_water.end_step()
                if self._steps <= 0:
                    self._left = 0
                    self.high_water.stop()
        self._went_back |= backward

    def discard_stale(self) -> None:
        """Discard the compiled code of stale graphs, but not during a backward pass.

        A backward pass may recompute, and must recompute with the graph of its forward pass.
        """
        if self._stale and not _in_backward_pass():  # the pass may be compiled as a whole
            self._is_over()
        elif self._stale and not self._queued:
            torch.autograd.Variable._execution_engine.queue_callback(self._is_over)
            self._queued = True

    def _is_over(self) -> None:
        self._queued = False
        while self._stale and not self.live_memory.has_waiting_runs():
            number, counts = self._stale.popitem()
            if counts:
                self._anew[number] += 1
            else:
                self.known.pop(number, None)
                self.observed[number] = Observations()
            self._compile_anew(number)

    def mark_stale(self, number: int) -> None:
        """Mark a graph for recompilation after the step, because the memory in use exceeds the assumption."""
        if self._stale.get(number, True) and self.known.get(number) is not self.observed[number]:
            self.known[number] = self.observed[number]
            self._stale[number] = True

    def waiting(self) -> list[int]:
        """Return the graphs that wait for a backward run and can be recompiled."""
        return [number for number in self.live_memory.waiting() if self._codes[number] is not None]

    def has_successor(self, number: int) -> bool:
        """Return true if other graphs were observed after a graph that seemed to be the function's last."""
        return number in self._with_successor

    def add_successor(self, earlier: Iterable[int], number: int) -> None:
        """Record that a graph follows earlier graphs, which kept more bytes than a later graph permits.

        The earlier graphs are recompiled after the step to keep less, without their observations.
        """
        self._with_successor.update(earlier)
        self._stale |= dict.fromkeys([*earlier, number], False)

    def _compile_anew(self, number: int) -> None:
        from mempool.torch.compiled.dynamo import discard_compiled_code

        code = self._codes[number]
        if self._anew[number] > TUNABLES.recompilations or not discard_compiled_code(code):
            observed = self.known.get(number, NO_OBSERVATIONS)
            name = self.function(number) or "a function"
            warnings.warn(
                f"outside a graph of {name} are {observed.bytes(backward=False)} bytes in the forward and "
                f"{observed.bytes(backward=True)} in the backward pass, and {observed.between} for a while "
                "between them, more than was counted",
                stacklevel=2,
            )


def _in_backward_pass() -> bool:
    """Return true if this thread is running a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)

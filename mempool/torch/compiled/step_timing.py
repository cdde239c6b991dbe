"""Measure the run times of both graphs of a step while a program trains."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Number of latest runs of each graph from which the median is taken; the first runs warm up.
_RUNS = 32


class Clock:
    """Run times of a step's graphs; on a GPU from events on the current stream, which nothing waits for."""

    def __init__(self) -> None:
        """Start without runs."""
        self._runs: dict[bool, deque[Any]] = {backward: deque(maxlen=_RUNS) for backward in (False, True)}

    def around(self, run: Callable[..., Any], inputs: Sequence[Any], *, backward: bool) -> Callable[..., Any]:
        """Wrap a callable with timing.

        Args:
            run: takes one list, like the callables of AOTAutograd's compilers.
            inputs: example inputs, which determine the device.
            backward: true for the backward graph.
        """
        on_gpu = any(isinstance(one, torch.Tensor) and one.is_cuda for one in inputs)
        timed = (_timed_on_gpu if on_gpu else _timed)(run, self._runs[backward])
        timed._boxed_call = True  # type: ignore[attr-defined]
        return timed

    def seconds(self) -> float | None:
        """Return the sum of the median forward and backward times; None until both have completed runs."""
        passes = [[s for one in runs if (s := _seconds(one)) is not None] for runs in self._runs.values()]
        return sum(map(median, passes)) if all(passes) else None


def _timed(run: Callable[..., Any], runs: deque[Any]) -> Callable[..., Any]:
    def timed(arguments: list[Any]) -> Any:
        begun = time.perf_counter()
        result = run(arguments)
        runs.append(time.perf_counter() - begun)
        return result

    return timed


def _timed_on_gpu(run: Callable[..., Any], runs: deque[Any]) -> Callable[..., Any]:
    def timed(arguments: list[Any]) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return run(arguments)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = run(arguments)
        end.record()
        runs.append((begin, end))
        return result

    return timed


def _seconds(run: Any) -> float | None:
    """Return the seconds of one run; None while the device has not finished the run."""
    if isinstance(run, float):
        return run
    begin, end = run
    return begin.elapsed_time(end) / 1e3 if end.query() else None

"""How long the two graphs of a step take while a program trains with them."""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Of so many last runs of each graph the median counts: the first ones warm up.
_RUNS = 32


class Clock:
    """Of one step's graphs. On a GPU by events of the stream that is current, which nobody waits for."""

    def __init__(self) -> None:
        """Nothing has run."""
        self._runs: dict[bool, deque[Any]] = {backward: deque(maxlen=_RUNS) for backward in (False, True)}

    def around(self, run: Callable[..., Any], inputs: Sequence[Any], *, backward: bool) -> Callable[..., Any]:
        """The same callable, whose runs are timed.

        Args:
            run: takes one list, as AOTAutograd's compilers make it.
            inputs: such as it will be given, of which the device is told.
            backward: which graph of the step it is.
        """
        on_gpu = any(isinstance(one, torch.Tensor) and one.is_cuda for one in inputs)
        timed = (_timed_on_gpu if on_gpu else _timed)(run, self._runs[backward])
        timed._boxed_call = True  # type: ignore[attr-defined]
        return timed

    def seconds(self) -> float | None:
        """Of a forward and a backward pass, medians; None while one of them has not ended."""
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
    """Of one run; None while the device has not come to its end."""
    if isinstance(run, float):
        return run
    begin, end = run
    return begin.elapsed_time(end) / 1e3 if end.query() else None

"""Replacements of PyTorch's functions for CUDA memory statistics, answered by the pool.

With a pluggable allocator, `torch.cuda.memory_allocated` and similar functions raise. All of them call a few
functions of `torch._C`, which this module replaces; PyTorch's own Python code above them is unchanged, even
under names that the program imported before.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mempool import _core
from mempool.errors import UsageError
from mempool.torch.introspection.counts import AllocatorStatistics

#: Function that returns the client and pool of a device's index, or None without a pool.
Source = Callable[[int], "tuple[_core.Client, _core.Pool] | None"]

_ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
)
#: Limits from this number of bytes count as unlimited.
_UNLIMITED = 2**63


def replace_functions(source: Source) -> None:
    """Answer PyTorch's memory functions from the pools of a source, until `restore_functions`.

    A new source replaces an earlier source. A device without a pool has no memory in use. A history under
    recording continues.
    """
    import torch

    with _functions.lock:
        _functions.source = source
        _functions.resume_history()
        for name, answer in FUNCTIONS.items():
            present = getattr(torch._C, name, None)
            if present is None or present is _replacements.get(name):
                continue  # absent in this build, or replaced already
            _replacements[name] = _replacement(present, answer)
            _originals[name] = present
            setattr(torch._C, name, _replacements[name])


def restore_functions() -> None:
    """Restore PyTorch's functions, except functions that other code has replaced."""
    import torch

    with _functions.lock:
        _functions.clear()
        for name, ours in list(_replacements.items()):
            if getattr(torch._C, name, None) is ours:
                setattr(torch._C, name, _originals[name])
            del _replacements[name], _originals[name]


@dataclass(frozen=True)
class History:
    """Arguments of the last `torch.cuda.memory._record_memory_history`."""

    max_entries: int = 0
    skip: tuple[str, ...] = ()


class MemoryFunctions:
    """Answers from the pools of a source; NotImplemented passes a call on to PyTorch's function."""

    def __init__(self) -> None:
        """Start without a source."""
        self.source: Source | None = None
        self.history = History()
        self.lock = threading.RLock()  # reentrant, since a garbage collection may call these functions
        self._statistics: dict[int, AllocatorStatistics] = {}

    def clear(self) -> None:
        """Drop the source, the history and all statistics."""
        for client, _ in self._served_devices().values():
            _core.set_history(client, 0)
        self.source, self.history = None, History()
        self._statistics.clear()

    def resume_history(self) -> None:
        """Record the requested history for the present clients."""
        if self.history.max_entries:
            for client, _ in self._served_devices().values():
                _core.set_history(client, self.history.max_entries)

    def memory_stats(self, device: int) -> Any:
        """Return the nested dict of `torch.cuda.memory_stats_as_nested_dict`."""
        counts = self._statistics_of(device)
        return NotImplemented if counts is None else counts.nested()

    def reset_peaks(self, device: int) -> Any:
        """Implement `torch.cuda.reset_peak_memory_stats`."""
        counts = self._statistics_of(device)
        return NotImplemented if counts is None else counts.reset_peaks()

    def reset_totals(self, device: int) -> Any:
        """Implement `torch.cuda.reset_accumulated_memory_stats`."""
        counts = self._statistics_of(device)
        return NotImplemented if counts is None else counts.reset_totals()

    def memory_fraction(self, device: int) -> Any:
        """Return the pool's limit as a fraction of the device's memory; 1.0 without a limit."""
        if self.source is None:
            return NotImplemented
        served = self.source(device) or _empty_pool()
        limit = served[1].stats()["max_reserved_bytes"]
        if limit >= _UNLIMITED:
            return 1.0
        import torch

        return min(1.0, limit / torch.cuda.get_device_properties(device).total_memory)

    def memory_snapshot(self, asked: tuple[Any, ...] | None = None) -> Any:
        """Implement `torch.cuda.memory._snapshot`.

        Args:
            asked: the two numbers of a pool's id, and optionally whether to include traces; None for all.
        """
        if self.source is None:
            return NotImplemented
        from mempool.torch.introspection import snapshots

        pool_id, traced = (0, 0), True
        if asked is not None:
            pool_id, traced = tuple(asked[:2]), asked[2] if len(asked) > 2 else True
        segments: list[Any] = []
        traces: list[list[Any]] = [[] for _ in range(devices())]
        for device, (client, pool) in self._served_devices().items():
            max_entries = self.history.max_entries if traced else 0
            found, traces[device] = snapshots.of_device(
                device, client, pool, max_entries=max_entries, skip=self.history.skip
            )
            segments.extend(s for s in found if pool_id in ((0, 0), s["segment_pool_id"]))  # zeros: all pools
        return snapshots.whole(segments, traces)

    def record_history(
        self, enabled: str | None, context: str | None, stacks: str, max_entries: int, *more: Any
    ) -> Any:
        """Implement `torch.cuda.memory._record_memory_history`, without frames.

        Raises:
            UsageError: a value is unknown to PyTorch.
        """
        if self.source is None:
            return NotImplemented
        _check_value("enabled", enabled, (None, "state", "all"))
        _check_value("context", context, (None, "state", "alloc", "all"))
        _check_value("stacks", stacks, ("python", "all"))
        return self._record(max_entries if enabled == "all" else 0, *more)

    def record_history_legacy(
        self, enabled: Any, _context: Any, max_entries: int, _alloc_context: Any, _cpp: Any, *more: Any
    ) -> Any:
        """Implement the older form of `record_history`."""
        return NotImplemented if self.source is None else self._record(max_entries if enabled else 0, *more)

    def _record(self, max_entries: int, clear: Any = False, *more: Any) -> None:  # noqa: FBT002
        skip = next((tuple(argument) for argument in more if isinstance(argument, (list, tuple))), ())
        for action in skip:
            _check_value("skip_actions", action, _ACTIONS)
        if max_entries < 0:
            raise UsageError(f"max_entries is {max_entries}, which is negative")
        self.history = History(max_entries, skip)
        for client, _ in self._served_devices().values():
            if clear:
                _core.set_history(client, 0)
            _core.set_history(client, max_entries)

    def is_history_enabled(self) -> Any:
        """Return true if events are recorded."""
        return NotImplemented if self.source is None else self.history.max_entries != 0

    def is_in_use(self) -> Any:
        """Return true if CUDA is in use, which PyTorch itself does not detect with a pluggable allocator."""
        import torch

        return NotImplemented if self.source is None or not torch.cuda.is_initialized() else True

    def empty_cache(self) -> Any:
        """Implement `torch.accelerator.empty_cache` for the pool's memory."""
        import torch

        return NotImplemented if self.source is None else torch.cuda.empty_cache()

    def allocation_traceback(self, _address: int) -> Any:
        """Return None, since no frames are recorded."""
        return NotImplemented if self.source is None else None

    def _served_devices(self) -> dict[int, tuple[_core.Client, _core.Pool]]:
        if self.source is None:
            return {}
        answers = ((device, self.source(device)) for device in range(devices()))
        return {device: served for device, served in answers if served is not None}

    def _statistics_of(self, device: int) -> AllocatorStatistics | None:
        if self.source is None:
            return None
        served = self.source(device) or _empty_pool()
        counts = self._statistics.get(device)
        if counts is None or counts.client is not served[0]:
            counts = self._statistics[device] = AllocatorStatistics(*served)
        return counts


@functools.cache
def _empty_pool() -> tuple[_core.Client, _core.Pool]:
    """Return an empty client and pool for a device without a pool."""
    pool = _core.Pool(device=_core.SimulatedDevice(capacity=0))
    return _core.Client(pool, "nobody"), pool


def devices() -> int:
    """Return the number of CUDA devices that PyTorch sees."""
    import torch

    return int(torch.cuda.device_count())


def _check_value(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name} is {value!r}; there are {', '.join(map(repr, known))}")


def _replacement(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(answer)
    def replaced(*args: Any) -> Any:
        # The pool must not learn from allocations of these functions.
        with _core.Bypass(), _functions.lock:
            answered = answer(*args)
        return original(*args) if answered is NotImplemented else answered

    return replaced


_functions = MemoryFunctions()
_replacements: dict[str, Callable[..., Any]] = {}
_originals: dict[str, Callable[..., Any]] = {}
#: Answers by name in `torch._C`, including the names that `torch.accelerator` uses.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "_cuda_memoryStats": _functions.memory_stats,
    "_cuda_resetPeakMemoryStats": _functions.reset_peaks,
    "_cuda_resetAccumulatedMemoryStats": _functions.reset_totals,
    "_cuda_getMemoryFraction": _functions.memory_fraction,
    "_cuda_memorySnapshot": _functions.memory_snapshot,
    "_cuda_record_memory_history": _functions.record_history,
    "_cuda_record_memory_history_legacy": _functions.record_history_legacy,
    "_cuda_isHistoryEnabled": _functions.is_history_enabled,
    "_cuda_allocationTraceback": _functions.allocation_traceback,
    "_accelerator_isAllocatorInitialized": _functions.is_in_use,
    "_accelerator_emptyCache": _functions.empty_cache,
    "_accelerator_getDeviceStats": _functions.memory_stats,
    "_accelerator_resetPeakStats": _functions.reset_peaks,
    "_accelerator_resetAccumulatedStats": _functions.reset_totals,
}


def _after_fork_in_child() -> None:
    _functions.lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)

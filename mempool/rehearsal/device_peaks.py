"""Peaks of device memory in a rehearsed program, by PyTorch's statistics."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mempool.rehearsal.job import Outcome


class DevicePeaks:
    """Peaks of each device, which outlast the program's resets.

    Attributes:
        outcome: the result that gets the peaks.
    """

    def __init__(self, torch: Any, outcome: Outcome) -> None:
        self._torch, self.outcome = torch, outcome
        self._peaks: dict[tuple[int, str], int] = {}  # before the program resets them

    def keep(self) -> None:
        """Measure the peaks before the program resets them."""
        for name in ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"):
            reset = getattr(self._torch.cuda, name, None)
            if reset is None:
                continue

            @functools.wraps(reset)
            def measured(*args: Any, reset: Any = reset, **options: Any) -> Any:
                self.measure()
                return reset(*args, **options)

            setattr(self._torch.cuda, name, measured)
            setattr(self._torch.cuda.memory, name, measured)

    def measure(self) -> None:
        """Write the memory of the fullest device so far into the result."""
        torch = self._torch
        if not torch.cuda.is_initialized():
            return
        held = []
        outcome = self.outcome
        for device in range(torch.cuda.device_count()):
            statistics = torch.cuda.memory_stats(device)
            for key in ("reserved_bytes.all.peak", "allocated_bytes.all.peak"):
                past = self._peaks.get((device, key), 0)
                self._peaks[device, key] = statistics[key] = max(past, statistics.get(key, 0))
            peak = statistics["reserved_bytes.all.peak"]
            free, total = torch.cuda.mem_get_info(device)
            held.append((peak, device, statistics, total - free))
        outcome.devices_used = sum(peak > 0 for peak, *_ in held)
        peak, device, statistics, used = max(held, key=lambda entry: (entry[0], -entry[1]))
        outcome.device = device
        outcome.peak_reserved_bytes = peak
        outcome.peak_allocated_bytes = statistics.get("allocated_bytes.all.peak", 0)
        outcome.allocated_bytes = statistics.get("allocated_bytes.all.current", 0)
        outcome.reserved_bytes = statistics.get("reserved_bytes.all.current", 0)
        outcome.segments = statistics.get("segment.all.current", 0)
        outcome.device_bytes = max(outcome.device_bytes, used + peak - outcome.reserved_bytes)

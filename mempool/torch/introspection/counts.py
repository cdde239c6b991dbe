"""Statistics of a pool under the names of PyTorch's own allocator.

| PyTorch | here |
| --- | --- |
| allocated | live: in use, after rounding |
| requested | the same before rounding |
| active | live, and freed but still used by another stream |
| reserved | held from the device |
| segment | pieces of memory held from the device |
| inactive_split | free memory in segments that contain live blocks |
| small_pool | memory served by size classes: requests up to the setting `small_bytes` |

The core's counters are exact. The number of segments, their small part and their idle bytes are sampled at
each read of the statistics, so their peaks and totals cover only those moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mempool import _core

#: Gauge in PyTorch's form: {"current", "peak", "allocated", "freed"}.
Stat = dict[str, int]


@dataclass
class SampledGauge:
    """A gauge that is sampled occasionally."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def sample(self, value: int) -> None:
        """Sample the present value."""
        self.allocated += max(value - self.current, 0)
        self.freed += max(self.current - value, 0)
        self.current = value
        self.peak = max(self.peak, value)

    def stat(self) -> Stat:
        """Return the gauge in PyTorch's form."""
        return {"current": self.current, "peak": self.peak, "allocated": self.allocated, "freed": self.freed}


@dataclass
class CoreCounters:
    """The core's counters at one moment."""

    client: dict[str, Any]
    usage: dict[str, Any]

    @property
    def gauges(self) -> dict[str, dict[str, int]]:
        """The gauges counted by the core, each with "current", "peak" and "total"."""
        held = self.usage["small"]["bytes"] + self.usage["large"]["bytes"]
        reserved = {
            "current": held,
            "peak": self.usage["recent_peak_bytes"],
            "total": self.usage["reserved_total_bytes"],
        }
        names = ("requested", "live", "blocks", "small", "small_requested", "small_live")
        return {"reserved": reserved, **{name: self.client[name] for name in names}}

    @property
    def counters(self) -> dict[str, int]:
        """The monotonic counters, which are reset with the totals."""
        return {"num_alloc_retries": self.usage["retries"], "num_ooms": self.client["out_of_memory"]}


class AllocatorStatistics:
    """PyTorch's statistics of one device."""

    def __init__(self, client: _core.Client, pool: _core.Pool) -> None:
        """Create the statistics of a client and of its pool's memory, from their beginning."""
        self.client, self.pool = client, pool
        parts = ("small", "large", "all")
        self._segments = {part: SampledGauge() for part in parts}
        self._idle_blocks = {part: SampledGauge() for part in parts}
        self._idle_bytes = {part: SampledGauge() for part in parts}
        self._small_reserved = SampledGauge()
        self._totals_before: dict[str, tuple[int, int]] = {}  # (total, freed) of each gauge at the last reset
        self._counters_before: dict[str, int] = {}

    def nested(self) -> dict[str, Any]:
        """Return all statistics, with the keys of `torch.cuda.memory_stats_as_nested_dict`."""
        counters = self._sample()
        gauges = counters.gauges
        allocation = self._split(gauges, "blocks", "small")
        allocated = self._split(gauges, "live", "small_live")
        return {
            **{name: value - self._counters_before.get(name, 0) for name, value in counters.counters.items()},
            "max_split_size": -1,  # any block may be split
            "num_sync_all_streams": counters.usage["waits"],
            "num_device_alloc": counters.usage["times_took"],
            "num_device_free": counters.usage["times_gave"],
            "num_oom_rejections": 0,
            "allocation": allocation,
            "segment": _by_part(self._segments),
            "active": _add_waiting(allocation, counters.client, "blocks"),
            "inactive_split": _by_part(self._idle_blocks),
            "allocated_bytes": allocated,
            "reserved_bytes": _split_parts(
                self._stat(gauges["reserved"], "reserved"), self._small_reserved.stat()
            ),
            "reserved_bytes_by_private_pools": {},
            "active_bytes": _add_waiting(allocated, counters.client, "bytes"),
            "inactive_split_bytes": _by_part(self._idle_bytes),
            "requested_bytes": self._split(gauges, "requested", "small_requested"),
            "oversize_allocations": SampledGauge().stat(),
            "oversize_segments": SampledGauge().stat(),
        }

    def reset_peaks(self) -> None:
        """Reset all peaks to the current values."""
        self.client.reset_peaks()
        self._sample()
        for gauge in self._all_gauges():
            gauge.peak = gauge.current

    def reset_totals(self) -> None:
        """Reset all totals, and the numbers of retries and of out-of-memory errors."""
        counters = self._sample()
        self._totals_before = {
            name: (gauge["total"], gauge["total"] - gauge["current"])
            for name, gauge in counters.gauges.items()
        }
        self._counters_before = counters.counters
        for gauge in self._all_gauges():
            gauge.allocated = gauge.freed = 0

    def _sample(self) -> CoreCounters:
        counters = CoreCounters(self.client.stats(), _core.usage(self.pool))
        small, large = counters.usage["small"], counters.usage["large"]
        for gauge, key in (
            (self._segments, "segments"),
            (self._idle_blocks, "idle_blocks"),
            (self._idle_bytes, "idle_bytes"),
        ):
            gauge["small"].sample(small[key])
            gauge["large"].sample(large[key])
            gauge["all"].sample(small[key] + large[key])
        self._small_reserved.sample(small["bytes"])
        return counters

    def _all_gauges(self) -> list[SampledGauge]:
        groups = (self._segments, self._idle_blocks, self._idle_bytes)
        return [self._small_reserved, *(gauge for group in groups for gauge in group.values())]

    def _stat(self, gauge: dict[str, int], name: str) -> Stat:
        total, freed = self._totals_before.get(name, (0, 0))
        current = gauge["current"]
        return {
            "current": current,
            "peak": gauge["peak"],
            "allocated": gauge["total"] - total,
            "freed": gauge["total"] - current - freed,
        }

    def _split(self, gauges: dict[str, dict[str, int]], name: str, small: str) -> dict[str, Stat]:
        return _split_parts(self._stat(gauges[name], name), self._stat(gauges[small], small))


def _split_parts(every: Stat, small: Stat) -> dict[str, Stat]:
    """Split a statistic into all, small and large, with the large peak estimated as a difference."""
    large = {key: every[key] - small[key] for key in every}
    large["peak"] = max(large["peak"], large["current"])
    return {"all": every, "small_pool": small, "large_pool": large}


def _by_part(gauge: dict[str, SampledGauge]) -> dict[str, Stat]:
    """Return a sampled statistic by part, with the totals of "all" as sums of the parts.

    Parts may change in opposite directions, so the changes of their sum would be too small.
    """
    small, large, every = (gauge[part].stat() for part in ("small", "large", "all"))
    for key in ("allocated", "freed"):
        every[key] = small[key] + large[key]
    return {"all": every, "small_pool": small, "large_pool": large}


def _add_waiting(stats: dict[str, Stat], client: dict[str, Any], unit: str) -> dict[str, Stat]:
    """Add freed memory that waits for other streams."""
    waiting, small = client[f"deferred_{unit}"], client[f"deferred_small_{unit}"]
    more = {part: dict(stat) for part, stat in stats.items()}
    for part, amount in (("all", waiting), ("small_pool", small), ("large_pool", waiting - small)):
        stat = more[part]
        stat["current"] += amount
        stat["freed"] -= amount
        stat["peak"] = max(stat["peak"], stat["current"])
    return more

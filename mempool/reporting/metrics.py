"""Flat numbers of a pool for loggers: see `mempool.Pool.metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.reporting.outcomes import missed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.pool import Pool

Metrics = dict[str, int | float | str]
#: Metrics before the first allocation.
NOTHING: Metrics = {
    "state": "",
    "steps": 0,
    "periods": 0,
    "planned_from": 0,
    "plans": 0,
    "hits": 0,
    "misses": 0,
    "hit_rate": 0.0,
    "live_bytes": 0,
    "live_peak_bytes": 0,
    "reserved_bytes": 0,
    "reserved_peak_bytes": 0,
    "planned_bytes": 0,
    "limit_bytes": 0,
    "waited_seconds": 0.0,
}
#: Metrics combined over several devices by their maximum; other numbers are added.
_COMMON = ("steps", "periods", "planned_from")


def make_metrics(pool: Pool) -> Metrics:
    """Return the metrics of a pool."""
    client, core, state = pool.client.stats(), pool.memory_counters(), pool.client.state()
    planned, offloading = pool.planned, pool.swapping_values() or {}
    steps = pool.step_counter.steps
    hits, misses = client["steady"]["hit"], missed(client["steady"])
    return {
        "state": pool.state,
        "steps": steps,
        "periods": 0 if steps or state["marked"] else state["iterations"],
        "planned_from": pool.step_counter.planned_from if steps else state["plan_active_at_iteration"],
        "plans": pool.plans,
        "hits": hits,
        "misses": misses,
        "hit_rate": _rate(hits, misses),
        "live_bytes": client["live"]["current"],
        "live_peak_bytes": client["live"]["peak"],
        "reserved_bytes": core["reserved"]["current"],
        "reserved_peak_bytes": core["reserved"]["peak"],
        "planned_bytes": 0 if planned is None else planned.plan.arena_bytes,
        "limit_bytes": offloading.get("limit_bytes") or 0,
        "waited_seconds": offloading.get("waited_seconds", 0.0),
    }


def joint_metrics(each: Sequence[Metrics], state: str) -> Metrics:
    """Combine the metrics of several devices."""
    joint: dict[str, Any] = dict(NOTHING)
    for metrics in each:
        for key, value in metrics.items():
            joint[key] = max(joint[key], value) if key in _COMMON else joint[key] + value
    return joint | {"state": state, "hit_rate": _rate(joint["hits"], joint["misses"])}


def _rate(hits: int, misses: int) -> float:
    return hits / (hits + misses) if hits + misses else 0.0

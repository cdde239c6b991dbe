"""Report of a pool's numbers, as a dict for scripts, one line, and a short table."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mempool.reporting.outcomes import NOT_MISSES, missed
from mempool.reporting.verdict import no_plan_reason, verdict
from mempool.units import sized

if TYPE_CHECKING:
    from mempool.planning.planned_pattern import PlannedPattern

#: Least peak of requested bytes of a program whose pool counts as used.
LITTLE = 1 << 20
_TEXT = (
    ("state", "state"),
    ("shared_with", "shared with"),
    ("steps", "steps"),
    ("periods", "periods"),
    ("planned_from", "planned from"),
    ("hits", "hits"),
    ("misses", "misses"),
    ("coverage", "coverage"),
    ("live_peak_bytes", "live at most"),
    ("persistent_bytes", "persistent"),
    ("planned_arena_bytes", "arena as planned"),
    ("planned_around_bytes", "of it planned around"),
    ("reserved_bytes", "reserved now"),
    ("reserved_peak_bytes", "reserved at most"),
    ("page_faults_per_step", "page faults a step"),
)
_SWAPPING = (
    ("limit_bytes", "limit"),
    ("peak_bytes", "most at once"),
    ("unplanned_peak_bytes", "without the limit"),
    ("iteration_out_bytes", "to the host, last step"),
    ("iteration_in_bytes", "and back"),
    ("waited_seconds", "seconds waited"),
    ("on_demand", "fetched on demand"),
    ("evicted", "evicted at once"),
    ("over_limit", "operations over the limit"),
    ("beyond_bytes", "reserved beyond the limit"),
    ("host_peak_bytes", "host memory at most"),
    ("host_full", "copies without room there"),
)


@dataclass(frozen=True)
class PoolSnapshot:
    """State of a pool at one moment, as reports and explanations read it.

    Attributes:
        name: name of the pool.
        state: see `mempool.Pool.state`.
        mode: see `mempool.Settings`.
        steps: completed steps of the program.
        planned_from: first step with a plan, or 0.
        page_faults: page faults of the process per step, or None.
        rank: rank of this process, or None.
        client_state: state of the client in the core.
        client_stats: counters of the client.
        core_stats: counters of the memory, which several clients may share.
        divergences: first departures from the plan in effect.
        decisions: latest decisions about plans and arena, the oldest first.
        planned: plan in use or made last, or None.
        plans: number of plans made.
        arena_used_bytes: bytes in use in the arena, by all clients.
        shared_with: names of the other clients of the memory.
        max_reserved_bytes: limit of the reserved memory, or None.
        offloading: the report's part about offloading, or None.
        withdrawal_reason: reason why the last unprofitable plan was withdrawn, or empty.
        is_worth_planning: false for little host memory, which the planner leaves without a plan.
    """

    name: str
    state: str
    mode: str
    steps: int
    planned_from: int
    page_faults: float | None
    rank: int | None
    client_state: dict[str, Any]
    client_stats: dict[str, Any]
    core_stats: dict[str, Any]
    divergences: list[dict[str, Any]]
    decisions: list[dict[str, Any]]
    planned: PlannedPattern | None
    plans: int
    arena_used_bytes: int
    shared_with: list[str]
    max_reserved_bytes: int | None
    offloading: dict[str, Any] | None
    withdrawal_reason: str
    is_worth_planning: bool


@dataclass(frozen=True)
class Report:
    """Counts since the pool's start, hits and misses since the first plan took effect, and sizes in bytes."""

    values: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return a copy, ready for JSON."""
        return dict(self.values)

    @property
    def has_work(self) -> bool:
        """True if the pool served more than next to nothing."""
        return bool(self.values["requested_peak_bytes"] >= LITTLE)

    @property
    def verdict(self) -> str:
        """One line about the pool: its plan, its memory, or why there is no plan."""
        return verdict(self.values)

    def rows(self) -> list[tuple[str, str]]:
        """Return labels and formatted values, without missing values."""
        said = self.values
        rows = [
            (label, readable(key, said[key])) for key, label in _TEXT if said[key] not in (None, 0, [], 0.0)
        ]
        reasons = [f"{reason} {count:,}" for reason, count in said["misses_by_reason"].items() if count]
        if reasons:
            rows.append(("misses by reason", ", ".join(reasons)))
        if (swapping := said["swapping"]) is not None:
            rows += [(label, readable(key, swapping[key])) for key, label in _SWAPPING if swapping.get(key)]
        return [*rows, *(("fault", fault) for fault in said.get("faults", ()))]

    def table(self) -> str:
        """Return the rows as text."""
        rows = self.rows()
        width = max((len(label) for label, _ in rows), default=0)
        return "\n".join(f"  {a:<{width}}  {b}" for a, b in rows)

    def __str__(self) -> str:
        return "\n".join([*(f"mempool: {line}" for line in self.verdict.splitlines()), self.table()])

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th style='text-align:left'>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>"
            for a, b in self.rows()
        )
        return f"<div><b>mempool</b>: {html.escape(self.verdict)}</div><table>{cells}</table>"


def readable(key: str, value: Any) -> str:
    """Return a value as text; sizes in bytes and in binary units."""
    if value is None:
        return "-"
    if key.endswith("_bytes"):
        return sized(value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.2%}" if key == "coverage" else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def make_report(pool: PoolSnapshot) -> Report:
    """Return the report of a pool's snapshot."""
    client, core, state = pool.client_stats, pool.core_stats, pool.client_state
    planned = pool.planned
    steady = client["steady"]
    misses, latest = ({k: v for k, v in c.items() if k not in NOT_MISSES} for c in (steady, client["latest"]))
    asked = steady["hit"] + sum(misses.values())
    values: dict[str, Any] = {
        "name": pool.name,
        "rank": pool.rank,
        "state": pool.state,
        "no_plan": no_plan_reason(pool),
        "steps": pool.steps,
        "periods": 0 if pool.steps or state["marked"] else state["iterations"],
        "planned_from": (pool.planned_from if pool.steps else state["plan_active_at_iteration"]) or None,
        "page_faults_per_step": pool.page_faults,
        "iterations": state["iterations"],
        "plan_active_at_iteration": state["plan_active_at_iteration"] or None,
        "latest_plan_active_at_iteration": state["latest_plan_active_at_iteration"] or None,
        "latest_plan_misses": sum(latest.values()),
        "hits": steady["hit"],
        "misses": sum(misses.values()),
        "misses_by_reason": misses,
        "hits_total": client["outcomes"]["hit"],
        # Without a plan, allocations cannot miss.
        "misses_total": missed(client["outcomes"]) - client["outcomes"]["unplanned"],
        "dynamic": steady["dynamic"],
        "out_of_iteration": steady["out_of_iteration"],
        "hit_rate": steady["hit"] / asked if asked else None,
        "coverage": planned.pattern.coverage if planned is not None else None,
        # Only the client of a buffer in the arena knows the owner.
        "persistent_bytes": None
        if pool.shared_with
        else max(client["live"]["current"] - pool.arena_used_bytes, 0),
        "shared_with": pool.shared_with,
        "max_reserved_bytes": pool.max_reserved_bytes,
        "arena_bytes": core["arena_bytes"],
        "small_allocations": client["small"]["total"],
        "allocations": client["blocks"]["total"],
        "out_of_memory": client["out_of_memory"],
        "foreign_frees": client["foreign_frees"],
        "plans": pool.plans,
        "arena_refused": core["arena_refused"],
        "arena_conversions": core["arena_conversions"],
        "device_calls": core["device_calls"],
        "segments": core["segments"],
        "stranded_bytes": core["segment_free_bytes"],
        **_plan_values(pool),
        "swapping": pool.offloading,
    }
    for name, gauge in (
        ("requested", client["requested"]),
        ("live", client["live"]),
        ("reserved", core["reserved"]),
    ):
        values[f"{name}_bytes"] = gauge["current"]
        values[f"{name}_peak_bytes"] = gauge["peak"]
        values[f"{name}_total_bytes"] = gauge["total"]
    return Report(values)


def _plan_values(pool: PoolSnapshot) -> dict[str, Any]:
    planned = pool.planned
    if planned is None:
        keys = ("peak_load_bytes", "lower_bound_bytes", "fragmentation", "solver", "status", "solve_seconds")
        return dict.fromkeys((*keys, "planned_arena_bytes", "planned_around_bytes", "planned_buffers"), None)
    plan = planned.plan
    return {
        "peak_load_bytes": planned.peak_load_bytes,
        "lower_bound_bytes": min(plan.lower_bound_bytes, planned.peak_load_bytes),
        "planned_arena_bytes": plan.arena_bytes,
        "planned_around_bytes": planned.around_bytes,
        "planned_buffers": int((~planned.buffers.persistent).sum()),
        "fragmentation": planned.fragmentation,
        "solver": plan.solver,
        "status": str(plan.status),
        "solve_seconds": plan.seconds,
    }

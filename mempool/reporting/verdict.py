"""Verdict: one line for users about a pool's effect."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mempool.planning.options import OPTIONS
from mempool.reporting.outcomes import REFUSALS, REMEDIES
from mempool.units import binary

if TYPE_CHECKING:
    from mempool.reporting.report import PoolSnapshot

#: Steps below which a program is too short for a plan: three equal steps, and the steps before and after.
FEW_STEPS = 5
#: Least hit rate at which the line does not mention misses.
GOOD_HIT_RATE = 0.95


def verdict(values: dict[str, Any]) -> str:
    """Return the verdict from a report's values."""
    rank = "" if values["rank"] is None else f" (rank {values['rank']})"
    said = [_plan(values), _memory(values), *_swapping(values["swapping"] or {})]
    faults = values["page_faults_per_step"]
    if faults is not None and values["no_plan"] is None:
        said.append(f"{faults:,.0f} page faults a step")
    return f"{values['name']}{rank}: {'; '.join(said)}"


def _plan(values: dict[str, Any]) -> str:
    unit = "step" if values["steps"] else "period"
    count = values[f"{unit}s"]
    of = f" after {count:,} {unit}{'s' * (count != 1)}" if count else ""
    if values["no_plan"] is not None:
        return f"no plan{of}: {values['no_plan']}"
    if not values["planned_from"]:
        return f"a plan is ready{of}, and not in effect yet"
    said = f"planned from {unit} {values['planned_from']:,} of {max(count, values['planned_from']):,}"
    if (rate := values["hit_rate"]) is None:
        return said
    said += f"; {math.floor(1000 * rate) / 10:.1f} % of requests at their planned address since"
    misses = values["misses_by_reason"]
    if rate >= GOOD_HIT_RATE or not any(misses.values()):
        return said
    reason = max(misses, key=misses.__getitem__)
    why = REMEDIES.get(reason, "no plan was in effect").partition(":")[0].partition(";")[0]
    return f"{said}, the others mostly as {reason}: {why}"


def _memory(values: dict[str, Any]) -> str:
    live, reserved = values["live_peak_bytes"], values["reserved_peak_bytes"]
    ratio = f"{reserved / live:.2f} x that" if live else binary(reserved)
    return f"live at most {binary(live)}, reserved at most {ratio}"


def _swapping(values: dict[str, Any]) -> list[str]:
    if not values.get("limit_bytes"):
        return []
    moved = binary(values["iteration_out_bytes"])
    said = f"limit {binary(values['limit_bytes'])}: {moved} to the host a step"
    return [f"{said}, {values['waited_seconds']:.2g} s waited in all"]


def no_plan_reason(pool: PoolSnapshot) -> str | None:
    """Return the reason for the lack of a plan, and a remedy; None if there is a plan."""
    state = pool.client_state
    if pool.mode != "replay":
        return f"none was asked for (MEMPOOL={pool.mode})"
    if state["refusal"] and not state["replaying"]:
        return f"it was made, but there is no memory for its arena: {REFUSALS[state['refusal']]}"
    if pool.planned is not None or state["replaying"]:
        return None
    if pool.withdrawal_reason:
        return f"it was withdrawn, as it did not pay: {pool.withdrawal_reason}"
    if state["plan_active_at_iteration"]:
        return "the one there was has been dropped, as the program did not follow it (see --explain)"
    if not pool.is_worth_planning:
        peak, least = pool.client_stats["live"]["peak"], OPTIONS.min_host_bytes
        return (
            f"it had at most {binary(peak)} of host memory in use, and a plan for less than {binary(least)} "
            "saves nothing; `pool.step()` at the end of each iteration asks for one all the same"
        )
    if state["events_dropped"]:
        return (
            "nothing has been seen to repeat within what the recording holds: an iteration must fit into it "
            "three times, or twice if it is marked by `pool.step()`"
        )
    if not pool.steps:
        return "nothing was seen to repeat; in a loop, `pool.step()` at the end of each iteration helps"
    if pool.steps < FEW_STEPS:
        return (
            f"it takes about {FEW_STEPS} steps that are alike; on a GPU, `mempool run --rehearse` plans "
            "before the first"
        )
    return (
        "no step made the requests of an earlier one; it would help to pad or bucket batches to few sizes, "
        "and to wrap evaluation in `with pool.dynamic():`"
    )

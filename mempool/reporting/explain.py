"""Explanation of misses: reasons and remedies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.reporting.outcomes import REFUSALS, REMEDIES, missed
from mempool.reporting.verdict import no_plan_reason
from mempool.units import binary, sized

if TYPE_CHECKING:
    from mempool import _core
    from mempool.reporting.report import PoolSnapshot


def explain(pool: PoolSnapshot) -> str:
    """Return the first divergences from the plan, their remedies, the ranges avoided, and the decisions."""
    lines = explain_divergences(pool.divergences, pool.client_state["refusal"])
    lines = lines or [_explain_no_divergences(pool)]
    return "\n".join([*lines, *_avoided_ranges(pool), *map(_decision, pool.decisions[-LATEST_DECISIONS:])])


#: Number of latest decisions at the end of an explanation.
LATEST_DECISIONS = 20


#: Text of each decision of the core's decision log.
DECISIONS = {
    "recording": "requests are recorded",
    "paused": "recording pauses: {reason}",
    "stopped": "recording ended",
    "period": "found {count:,} allocations that recur, {times:,} times",
    "planned": "plan {pattern}: {count:,} allocations in {size}",
    "replaced": "plan {pattern} replaces the one for the same {count:,} allocations: {size}",
    "jointly": "planned {count:,} variants together",
    "around": "planned around {count:,} ranges that stay in the arena",
    "loaded": "plan {pattern}, from a file, to begin with: {count:,} allocations in {size}",
    "confirmed": "the program follows the loaded plans",
    "set_aside": "set the loaded plans aside: the program does not follow them",
    "superseded": "dropped plan {pattern}: another serves its allocations",
    "evicted": "evicted plan {pattern}: least recently used",
    "withdrawn": "the plans did not pay",
    "forgotten": "dropped plan {pattern}: it was unused, and memory was short",
    "dropped": "dropped all plans",
    "arena": "the arena of {size} {reason}",
    "refused": "no arena of {size} for plan {pattern}: {reason}",
    "outgrown": "the iteration is larger than planned: it bypasses the plan",
}


#: Text of each event of the arena, and of each event that pauses recording.
EVENTS = {
    "taken": "is taken",
    "grown": "has grown in place",
    "shrunk": "is what is left",
    "blocked": "gets no buffers where some live, to be replaced by a larger one once empty",
    "unblocked": "is not replaced for now",
    "released": "is released",
    "converted": "became segments: memory was short",
    "settled": "the program follows its plans",
    "improvable": "the program follows its plans, which may be made smaller later",
    "fruitless": "nothing new shows",
    "failed": "planning failed",
}


def _decision(entry: dict[str, Any]) -> str:
    text = DECISIONS[entry["decision"]]
    reason = {**REFUSALS, **EVENTS}.get(entry["reason"], "")
    said = text.format(**{**entry, "size": binary(entry["bytes"]), "reason": reason})
    return f"iteration {entry['iteration']:,}: {said}"


def _explain_no_divergences(pool: PoolSnapshot) -> str:
    state = pool.client_state
    if state["replaying"]:
        if before := missed(pool.client_stats["outcomes"]):
            return f"no divergences since the latest plan took effect; {before:,} misses before"
        return "no divergences: every allocation followed the plan"
    reason = no_plan_reason(pool)
    return f"no plan in effect: {pool.state}{'' if reason is None else f': {reason}'}"


def _avoided_ranges(pool: PoolSnapshot) -> list[str]:
    """Return a line about the part of the arena that the plan avoids, if any."""
    avoided_bytes = 0 if pool.planned is None else pool.planned.around_bytes
    if not avoided_bytes:
        return []
    return [
        f"{binary(avoided_bytes)} of the arena are in use beside the plan, which was made around them: "
        f"{'another client plans there, or ' * bool(pool.shared_with)}something keeps buffers longer "
        "than when they were recorded (a log, a list, an exception's traceback); let go of it, and the next "
        "plan is smaller"
    ]


def explain_divergences(divergences: list[dict[str, Any]], refusal: str = "") -> list[str]:
    """Return one line for each outcome, with its remedy and first divergence.

    ``refusal`` is the core's reason for the lack of a larger arena, or empty.
    """
    first = {divergence["outcome"]: divergence for divergence in reversed(divergences)}
    lines = [_line(divergence) for divergence in reversed(first.values())]
    if "no_arena" in first and refusal:
        lines.append(f"no larger arena: {REFUSALS[refusal]}")
    return lines


class NewDivergences:
    """Divergences of a client that have not been logged yet."""

    def __init__(self, client: _core.Client) -> None:
        """Start with all divergences unlogged."""
        self._client, self._logged = client, 0

    def __call__(self) -> list[str]:
        """Return lines for the divergences since the last call."""
        divergences = self._client.divergences()
        if len(divergences) < self._logged:  # a new plan starts a new list
            self._logged = 0
        fresh, self._logged = divergences[self._logged :], len(divergences)
        return explain_divergences(fresh, self._client.state()["refusal"])


def _line(divergence: dict[str, Any]) -> str:
    outcome, got = divergence["outcome"], sized(divergence["actual_bytes"])
    if divergence["expected_bytes"] != divergence["actual_bytes"]:
        expected = f"{divergence['expected_bytes']:,} B" if divergence["expected_bytes"] else "nothing more"
        got = f"expected {expected}, got {got}"
    what = f"{outcome}: {REMEDIES[outcome]}" if outcome in REMEDIES else outcome
    return (
        f"{what}; first in iteration {divergence['iteration']:,} at position {divergence['position']} "
        f"(thread {divergence['sequence']}, stream {divergence['stream']}): {got}"
    )

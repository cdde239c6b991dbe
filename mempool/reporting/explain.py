"""Explanation of misses: reasons and remedies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool import sharing
from mempool.reporting.outcomes import NOT_MISSES, REFUSALS, REMEDIES
from mempool.units import binary, sized

if TYPE_CHECKING:
    from mempool import _core
    from mempool.pool import Pool


def explain(pool: Pool) -> str:
    """Return the first divergences from the plan, their remedies, and the ranges that the plan avoids."""
    return "\n".join([*_divergences(pool), *_kept(pool)])


def _divergences(pool: Pool) -> list[str]:
    lines = explained(pool.client.divergences(), pool.client.state()["refusal"])
    return lines or [_without_divergences(pool)]


def _without_divergences(pool: Pool) -> str:
    if pool.client.state()["replaying"]:
        outcomes = pool.client.stats()["outcomes"]
        before = sum(count for outcome, count in outcomes.items() if outcome not in NOT_MISSES)
        if before:
            return f"no divergences since the latest plan took effect; {before:,} misses before"
        return "no divergences: every allocation followed the plan"
    state = pool.client.state()
    if state["refusal"]:
        return f"no plan in effect: {pool.state}; no arena for it: {REFUSALS[state['refusal']]}"
    return f"no plan in effect: {pool.state}{_too_long(state)}"


def _kept(pool: Pool) -> list[str]:
    """Return a line about the part of the arena that the plan avoids, if any."""
    around = 0 if pool.planned is None else pool.planned.around_bytes
    if not around:
        return []
    return [
        f"{binary(around)} of the arena are in use beside the plan, which was made around them: "
        f"{'another client plans there, or ' * bool(sharing.others(pool))}something keeps buffers longer "
        "than when they were recorded (a log, a list, an exception's traceback); let go of it, and the next "
        "plan is smaller"
    ]


def _too_long(state: dict[str, Any]) -> str:
    """Return a hint if the recording was full without any recurring pattern, else ""."""
    if not state["events_dropped"] or state["plan_active_at_iteration"]:
        return ""
    return (
        "; nothing has been seen to repeat within what the recording holds: an iteration must fit into it "
        "three times, or twice if it is marked by `pool.step()`"
    )


def explained(divergences: list[dict[str, Any]], refusal: str = "") -> list[str]:
    """Return one line for each divergence, then the remedy for each type of divergence.

    ``refusal`` is the core's reason for the lack of a larger arena, or empty.
    """
    kinds = dict.fromkeys(one["outcome"] for one in divergences)
    remedies = [f"{kind}: {REMEDIES[kind]}" for kind in kinds if kind in REMEDIES]
    if "no_arena" in kinds and refusal:
        remedies.append(f"no larger arena: {REFUSALS[refusal]}")
    return [*map(_line, divergences), *remedies]


class News:
    """Divergences of a client that have not been logged yet."""

    def __init__(self, client: _core.Client) -> None:
        """Start with all divergences unlogged."""
        self._client, self._told = client, 0

    def __call__(self) -> list[str]:
        """Return lines for the divergences since the last call."""
        divergences = self._client.divergences()
        if len(divergences) < self._told:  # a new plan has begun a new list
            self._told = 0
        fresh, self._told = divergences[self._told :], len(divergences)
        return explained(fresh, self._client.state()["refusal"])


def _line(one: dict[str, Any]) -> str:
    times = f", {one['repeats']} times" if one["repeats"] > 1 else ""
    got = sized(one["actual_bytes"])
    if one["expected_bytes"] != one["actual_bytes"]:
        expected = f"{one['expected_bytes']:,} B" if one["expected_bytes"] else "nothing more"
        got = f"expected {expected}, got {got}"
    return (
        f"iteration {one['iteration']}, thread {one['sequence']}, stream {one['stream']}, "
        f"position {one['position']}: {got}: {one['outcome']}{times}"
    )

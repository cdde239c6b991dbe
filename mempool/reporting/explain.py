"""Explanation of misses: reasons and remedies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool import sharing
from mempool.reporting.report import NOT_MISSES, binary, sized

if TYPE_CHECKING:
    from mempool import _core
    from mempool.pool import Pool

_REMEDIES = {
    "other_size": "an extra allocation or a changed shape: harmless if rare; wrap evaluation, logging and "
    "checkpoints in `with pool.dynamic():`, and mark iterations with `pool.step()` so that the pool realigns "
    "at once",
    "occupied": "a buffer from before is still alive at its address: something keeps it longer than when it "
    "was recorded (a log, a list, an exception's traceback); copy what you keep, or make it in "
    "`with pool.dynamic():`",
    "exhausted": "more allocations than the recorded iteration has before the next mark",
    "lost": "the program, or this thread of it, is in none of the recorded patterns; it is recorded again "
    "when that lasts",
    "no_arena": "the arena could not be had from the device, or not as large as this plan needs it, or its "
    "memory was needed for what has no place in it",
    "other_stream": "another stream used the memory last: the plan lets streams share addresses, which this "
    "pool does only with `wait_bytes=`, or more streams use the arena than are told apart",
}

#: Texts for the core's reasons to refuse an arena.
REFUSALS = {
    "capture": "a graph is being captured",
    "alive": "buffers are alive in the one there is, which cannot grow beside them; "
    'memory="growing" is for such programs',
    "limit": "with what else is held it would be more than the limit",
    "memory": "there is too little memory; raise max_reserved or free memory elsewhere",
}


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
    remedies = [f"{kind}: {_REMEDIES[kind]}" for kind in kinds if kind in _REMEDIES]
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

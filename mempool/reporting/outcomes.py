"""Outcomes of allocations: counts, and the reasons of misses and refused arenas with their remedies."""

from __future__ import annotations

#: Outcomes other than misses: hits, positions that no plan could serve, and allocations that the program
#: excluded from plans.
NOT_MISSES = ("hit", "dynamic", "out_of_iteration")


def missed(outcomes: dict[str, int]) -> int:
    """Return the number of allocations that had no plan or did not follow the plan."""
    return sum(count for outcome, count in outcomes.items() if outcome not in NOT_MISSES)


class NewOutcomes:
    """Counter of the allocations of each outcome since the previous call."""

    def __init__(self) -> None:
        """Start at zero: the first call returns all allocations."""
        self._before: dict[str, int] = {}

    def of(self, outcomes: dict[str, int]) -> dict[str, int]:
        """Return the increase of each outcome since the last call."""
        new = {outcome: count - self._before.get(outcome, 0) for outcome, count in outcomes.items()}
        self._before = outcomes
        return new


#: Remedy of each reason of a miss.
REMEDIES = {
    "size_mismatch": "an extra allocation or a changed shape: harmless if rare; wrap evaluation, logging and "
    "checkpoints in `with pool.dynamic():`, and mark iterations with `pool.step()` so that the pool realigns "
    "at once",
    "slot_occupied": "a buffer from before is still alive at its address: something keeps it longer than "
    "when it was recorded (a log, a list, an exception's traceback); copy what you keep, or make it in "
    "`with pool.dynamic():`",
    "past_end": "more allocations than the recorded iteration has before the next mark",
    "desynchronized": "the program, or this thread of it, follows none of the recorded patterns; the pool "
    "records again if this lasts; wrap evaluation and other rare phases in `with pool.dynamic():`",
    "no_arena": "the device refused the arena, or granted a smaller one than the plan needs, or the "
    "arena's memory went to unplanned requests",
    "other_stream": "another stream used the memory last: the plan lets streams share addresses, which this "
    "pool does only with `wait_bytes=`, or more streams use the arena than the pool distinguishes",
}

#: Texts for the core's reasons to refuse an arena.
REFUSALS = {
    "capture": "a graph is being captured",
    "alive": "buffers are alive in the present arena, which cannot grow beside them; "
    'memory="growing" with backend="pluggable" is for such programs',
    "limit": "the arena and the other held memory would exceed the limit",
    "memory": "there is too little memory; raise max_reserved (or a guest's memory fraction) "
    "or free memory elsewhere",
}

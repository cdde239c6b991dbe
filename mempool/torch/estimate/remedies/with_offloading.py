"""Combinations of changes with swapping, for jobs where neither suffices alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mempool.torch.estimate.remedies.changes import Cost, applied
from mempool.torch.estimate.remedies.offloading import as_help, swapping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.torch.estimate.remedies.changes import Change, Ladder
    from mempool.torch.estimate.remedies.trials import Help, Trials

#: Largest number of single changes tried with swapping, cheapest first, once all changes together suffice.
_MOST = 3


def with_swapping(trials: Trials, alone: Sequence[tuple[Ladder, Help]]) -> Help | None:
    """Return the cheapest single change that fits with swapping, or else all changes below swapping's cost.

    Each change is taken at full strength.

    Args:
        trials: runs of a job that does not fit.
        alone: each change, with the result of the change alone.
    """
    kept = [(ladder.strongest, own) for ladder, own in alone]
    useful = sorted(
        (
            change
            for change, own in kept
            if own.saves_bytes > 0 and change.cost < Cost.TRANSFERS and change.allocator is None
        ),
        key=lambda change: change.cost,
    )
    if not useful or (best := _planned(trials, useful)) is None:
        return None
    for change in useful[:_MOST] if len(useful) > 1 else ():
        if (found := _planned(trials, [change])) is not None:
            return found
    return best


def _planned(trials: Trials, changes: Sequence[Change]) -> Help | None:
    """Combine changes with swapping; return None if the result does not fit or cannot be tried."""
    made = trials.tried(changes)
    fit = trials.run_of(changes)
    if made is None or fit is None or not trials.goes_on():
        return None
    trials.told(f"{made.name} + swapping")
    found = swapping(applied(trials.job, changes), fit)
    if found is None or not found.fits or found.asked is None:
        return None
    own, before = as_help(found, fit), trials.fit
    return replace(
        own,
        name=f"{made.name} + {own.name}",
        saves_bytes=before.needed_bytes - own.needed_bytes,
        saves_peak_bytes=before.peak_bytes - own.peak_bytes,
        saves_reserved_bytes=before.reserved_bytes[before.allocator] - own.reserved_bytes,
        how=f"{made.how}; {own.how}",
        code=f"{made.code}\n{own.code}",
        recomputes=made.recomputes,
        parts=(*made.parts, *own.parts),
    )

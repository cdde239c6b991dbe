"""Changes that make a job fit together with swapping, where neither is enough without the other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from mempool.torch.fitting.helps.changes import Cost, applied
from mempool.torch.fitting.helps.swapping import as_help, swapping

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.torch.fitting.helps.changes import Change, Ladder
    from mempool.torch.fitting.helps.trials import Help, Trials

#: Changes that are tried with it by themselves, cheapest first, once all of them together are enough.
_MOST = 3


def with_swapping(trials: Trials, alone: Sequence[tuple[Ladder, Help]]) -> Help | None:
    """The cheapest single change, or else all that leave the training as it is, with a plan of swaps.

    Each is taken as strong as it can be.

    Args:
        trials: of the job, which lacks something.
        alone: changes by themselves, and what came of them.
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
    """Some changes and swapping; None where that does not fit, or cannot be tried."""
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

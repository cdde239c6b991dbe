"""Search for the cheapest combination of changes that makes a job fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mempool.torch.estimate.remedies.changes import Cost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.torch.estimate.remedies.changes import Change, Ladder
    from mempool.torch.estimate.remedies.trials import Help, Trials


def cheapest_of(trials: Trials, alone: Sequence[tuple[Ladder, Help]]) -> tuple[Help | None, Help | None]:
    """Add changes by cost, cheapest first, while each saves, until the job fits; then drop unneeded changes.

    So no dearer change is taken while cheaper ones suffice, no change with a cost in the result can be left
    out, and changes with strengths (blocks, batches) have the weakest strength that fits.

    Args:
        trials: runs of the job.
        alone: each change in several strengths, with the result of the change alone.

    Returns:
        The changes that make the job fit, or None; and if None, the changes that save most and leave the
        training as it is.
    """
    chosen: dict[str, Ladder] = {}
    best: Help | None = None
    same: Help | None = None
    for ladder, own in sorted(alone, key=lambda pair: (pair[0].strongest.cost, -pair[1].saves_bytes)):
        step = ladder.strongest
        if step.cost is Cost.TRAINING:
            same = same or best
        if not _may_help(step, own, best):
            continue
        tried = trials.tried([one.strongest for one in {**chosen, step.kind: ladder}.values()])
        if tried is None or tried.saves_bytes <= (best.saves_bytes if best else 0):
            continue
        chosen[step.kind], best = ladder, tried
        if best.fits:
            return _lightened(trials, list(chosen.values())), None
    return None, same or best


def _may_help(step: Change, alone: Help, best: Help | None) -> bool:
    """Return whether a run is worthwhile: a change useless alone may save once the peak has moved."""
    if best is None:
        return alone.saves_bytes > 0
    if step.phase is not None:
        return best.peak_phase == step.phase
    return alone.saves_bytes > 0 or best.peak_operation != alone.peak_operation


def _lightened(trials: Trials, chosen: Sequence[Ladder]) -> Help | None:
    """Reduce changes that fit together to the needed ones, each as weak as possible."""
    left = sorted(chosen, key=lambda one: -one.strongest.cost)
    for ladder in [one for one in left if one.strongest.cost > Cost.NOTHING]:
        _drop(trials, left, ladder)
    for at, ladder in enumerate(left):
        others = [one.strongest for one in left if one is not ladder]
        left[at] = trials.weakest(ladder, others)
    for ladder in [one for one in left if one.strongest.cost == Cost.NOTHING]:
        _drop(trials, left, ladder)
    return trials.tried([one.strongest for one in left])


def _drop(trials: Trials, left: list[Ladder], ladder: Ladder) -> None:
    """Remove a change that the job does not need to fit."""
    others = [one for one in left if one is not ladder]
    if others and (tried := trials.tried([one.strongest for one in others])) is not None and tried.fits:
        left[:] = others

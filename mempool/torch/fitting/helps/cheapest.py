"""The cheapest changes that together make a job fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mempool.torch.fitting.helps.changes import Cost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.torch.fitting.helps.changes import Change, Ladder
    from mempool.torch.fitting.helps.trials import Help, Trials


def cheapest_of(trials: Trials, alone: Sequence[tuple[Ladder, Help]]) -> tuple[Help | None, Help | None]:
    """Changes go in by cost, cheapest first, as long as they save, until it fits; then out what need not be.

    So nothing dearer is taken while cheaper changes are enough, of what is taken nothing that costs can be
    left out, and what has degrees (blocks, batches) has the least that does.

    Args:
        trials: of the job.
        alone: changes by themselves, each in several strengths, and what came of them.

    Returns:
        The changes that make it fit, or None; and where there are none, those that save most and leave the
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
    """Whether a run is worth it: what saves nothing alone may do so once the peak has gone elsewhere."""
    if best is None:
        return alone.saves_bytes > 0
    if step.phase is not None:
        return best.peak_phase == step.phase
    return alone.saves_bytes > 0 or best.peak_operation != alone.peak_operation


def _lightened(trials: Trials, chosen: Sequence[Ladder]) -> Help | None:
    """Of changes that make it fit together those that must be, each as weak as can be."""
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
    """Take a change out if it fits without."""
    others = [one for one in left if one is not ladder]
    if others and (tried := trials.tried([one.strongest for one in others])) is not None and tried.fits:
        left[:] = others

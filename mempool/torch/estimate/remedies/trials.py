"""Fake runs of changed jobs, each done once, and the cheapest combination that makes a job fit."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from mempool.torch.estimate.estimator import estimate, reserved
from mempool.torch.estimate.largest_batch import largest
from mempool.torch.estimate.options import OPTIONS
from mempool.torch.estimate.remedies.changes import KINDS, Change, Cost, Ladder, applied
from mempool.torch.estimate.remedies.offloading import offload_remedy, plan_offload
from mempool.torch.estimate.result import Fit, TriedRemedy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mempool.torch.estimate.job import Job
    from mempool.torch.estimate.remedies.changes import Change


class Trials:
    """Fake runs of changed jobs, each cached.

    Args:
        job: the job to change.
        fit: result of the unchanged job.
        most_runs: largest number of runs of changed jobs.
        until: processor time of the process, in seconds, after which no run begins.
        progress: called with the name of each trial.
    """

    def __init__(
        self, job: Job, fit: Fit, most_runs: int, until: float, progress: Callable[[str], object]
    ) -> None:
        self.job, self.fit, self.progress = job, fit, progress
        self._left, self._until = most_runs, until
        self._runs: dict[tuple[str, ...], Fit | None] = {(): fit}
        self._reasons: dict[str, str] = {}

    def try_ladder(self, ladder: Ladder) -> TriedRemedy | None:
        """Try a change alone, just as strong as needed if the needed saving is known."""
        if ladder.strongest.phase not in (None, self.fit.peak_phase):
            return None if self.fit.fits is not False else self._without_saving(ladder.strongest)
        if self.fit.fits is not False:
            return self.try_changes([ladder.steps[ladder.usual]])
        best = self.try_changes([ladder.strongest])
        return (
            self.try_changes([self.weakest_that_fits(ladder, []).strongest]) if best and best.fits else best
        )

    def try_changes(self, changes: Sequence[Change]) -> TriedRemedy | None:
        """Try changes of different kinds together; return None if they could not be tried."""
        changes = sorted(changes, key=lambda change: KINDS.index(change.kind))
        made = self._run([change for change in changes if change.allocator is None])
        return None if made is None else self._remedy(changes, made)

    def run_of(self, changes: Sequence[Change]) -> Fit | None:
        """Return the full result of the run made for `try_changes`."""
        return self._run(sorted(changes, key=lambda change: KINDS.index(change.kind)))

    def has_time(self) -> bool:
        """Return whether time is left for another run."""
        return time.process_time() <= self._until

    def failures(self) -> list[tuple[str, str]]:
        """Return the changes that could not be tried, with reasons."""
        return list(self._reasons.items())

    def weakest_that_fits(self, ladder: Ladder, others: Sequence[Change]) -> Ladder:
        """Return the ladder up to the weakest step that fits with other changes; the strongest must fit."""
        count, limit = len(ladder.steps), self.fit.limit_bytes or 0
        if count == 1:
            return ladder

        def needs(weakness: int) -> int:
            tried = None if weakness > count else self.try_changes([ladder.steps[count - weakness], *others])
            return max(limit + 1, self.fit.needed_bytes) if tried is None else tried.needed_bytes

        return Ladder(ladder.steps[: count + 1 - max(1, largest(needs, limit))])

    def _run(self, changes: Sequence[Change]) -> Fit | None:
        key = tuple(change.name for change in changes)
        if key not in self._runs:
            self._runs[key] = self._try(" + ".join(key), changes)
        return self._runs[key]

    def _try(self, name: str, changes: Sequence[Change]) -> Fit | None:
        if self._left <= 0 or time.process_time() > self._until:
            self._reasons[name] = "no runs are left" if self._left <= 0 else "no time is left"
            return None
        self._left -= 1
        self.progress(name)
        try:
            return estimate(
                applied(self.job, changes),
                self.fit.limit_bytes,
                allocators=(self.fit.allocator,),
                largest=False,
            )
        except Exception as error:
            self._reasons[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return None

    def _remedy(self, changes: Sequence[Change], made: Fit) -> TriedRemedy:
        before, limit = self.fit, self.fit.limit_bytes
        allocator = next((change.allocator for change in changes if change.allocator), before.allocator)
        held = made.reserved_bytes.get(allocator)
        if held is None:
            held = made.reserved_bytes[allocator] = reserved(made.trace, [allocator])[allocator]
        needed = held + sum(made.margin_bytes.values())
        shares = [change.recomputes for change in changes if change.recomputes is not None]
        return TriedRemedy(
            name=" + ".join(change.name for change in changes),
            saves_bytes=before.needed_bytes - needed,
            how="; ".join(change.how for change in changes),
            code="\n".join(change.code for change in changes),
            needed_bytes=needed,
            peak_bytes=made.peak_bytes,
            saves_peak_bytes=before.peak_bytes - made.peak_bytes,
            reserved_bytes=held,
            saves_reserved_bytes=before.reserved_bytes[before.allocator] - held,
            peak_phase=made.peak_phase,
            peak_operation=made.peak_operation,
            fits=None if limit is None else needed <= limit,
            cost=max(change.cost for change in changes).name.lower(),
            recomputes=sum(shares) if shares else None,
            parts=tuple(change.name for change in changes),
        )

    def _without_saving(self, change: Change) -> TriedRemedy:
        """Return the zero saving of a change that does not affect the phase of the peak."""
        return self._remedy([change], self.fit)


def cheapest_of(
    trials: Trials, alone: Sequence[tuple[Ladder, TriedRemedy]]
) -> tuple[TriedRemedy | None, TriedRemedy | None]:
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
    best: TriedRemedy | None = None
    same: TriedRemedy | None = None
    for ladder, own in sorted(alone, key=lambda pair: (pair[0].strongest.cost, -pair[1].saves_bytes)):
        step = ladder.strongest
        if step.cost is Cost.TRAINING:
            same = same or best
        if not _may_help(step, own, best):
            continue
        tried = trials.try_changes([change.strongest for change in {**chosen, step.kind: ladder}.values()])
        if tried is None or tried.saves_bytes <= (best.saves_bytes if best else 0):
            continue
        chosen[step.kind], best = ladder, tried
        if best.fits:
            return _weakened(trials, list(chosen.values())), None
    return None, same or best


def _may_help(step: Change, alone: TriedRemedy, best: TriedRemedy | None) -> bool:
    """Return whether a run is worthwhile: a change useless alone may save once the peak has moved."""
    if best is None:
        return alone.saves_bytes > 0
    if step.phase is not None:
        return best.peak_phase == step.phase
    return alone.saves_bytes > 0 or best.peak_operation != alone.peak_operation


def _weakened(trials: Trials, chosen: Sequence[Ladder]) -> TriedRemedy | None:
    """Reduce changes that fit together to the needed ones, each as weak as possible."""
    left = sorted(chosen, key=lambda change: -change.strongest.cost)
    for ladder in [change for change in left if change.strongest.cost > Cost.NOTHING]:
        _drop(trials, left, ladder)
    for at, ladder in enumerate(left):
        others = [change.strongest for change in left if change is not ladder]
        left[at] = trials.weakest_that_fits(ladder, others)
    for ladder in [change for change in left if change.strongest.cost == Cost.NOTHING]:
        _drop(trials, left, ladder)
    return trials.try_changes([change.strongest for change in left])


def _drop(trials: Trials, left: list[Ladder], ladder: Ladder) -> None:
    """Remove a change that the job does not need to fit."""
    others = [change for change in left if change is not ladder]
    if (
        others
        and (tried := trials.try_changes([change.strongest for change in others])) is not None
        and tried.fits
    ):
        left[:] = others


def combined_with_offload(trials: Trials, alone: Sequence[tuple[Ladder, TriedRemedy]]) -> TriedRemedy | None:
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
    if not useful or (best := _plan_combination(trials, useful)) is None:
        return None
    for change in useful[: OPTIONS.offload_changes] if len(useful) > 1 else ():
        if (found := _plan_combination(trials, [change])) is not None:
            return found
    return best


def _plan_combination(trials: Trials, changes: Sequence[Change]) -> TriedRemedy | None:
    """Combine changes with swapping; return None if the result does not fit or cannot be tried."""
    made = trials.try_changes(changes)
    fit = trials.run_of(changes)
    if made is None or fit is None or not trials.has_time():
        return None
    trials.progress(f"{made.name} + swapping")
    found = plan_offload(applied(trials.job, changes), fit)
    if found is None or not found.fits or found.at_limit is None:
        return None
    own, before = offload_remedy(found, fit), trials.fit
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

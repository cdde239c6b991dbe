"""Search for remedies: fake runs of changed jobs, and the cheapest combination that makes a job fit."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mempool.torch.estimate.estimator import estimate, reserved
from mempool.torch.estimate.fake.isolation import shared_isolation
from mempool.torch.estimate.options import OPTIONS
from mempool.torch.estimate.remedies.changes import Change, Cost, Strengths, applied, changes_of
from mempool.torch.estimate.result import Advice, Fit, TriedRemedy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mempool.torch.estimate.job import Job


@shared_isolation()
def advise(
    job: Job,
    fit: Fit,
    *,
    most_seconds: float = OPTIONS.remedy_seconds,
    progress: Callable[[str], object] = lambda _: None,
) -> Advice:
    """Try remedies for a job, alone and together.

    Args:
        job: the job; the job and its model stay unchanged.
        fit: result of the job's fake run.
        most_seconds: processor seconds after which no further run begins.
        progress: called with the name of each trial.

    Raises:
        UsageError: ``fit`` belongs to a job that cannot be tried.
    """
    trials = Trials(job, fit, time.process_time() + most_seconds, progress)
    tried = [(strengths, trials.try_weakest(strengths)) for strengths in changes_of(job)]
    alone = [(strengths, remedy) for strengths, remedy in tried if remedy is not None]
    remedies = sorted(
        (remedy for _, remedy in alone if remedy.saves_bytes > 0),
        key=lambda remedy: (-remedy.saves_bytes, remedy.name),
    )
    cheapest, combined = cheapest_of(trials, alone) if fit.fits is False else (None, None)
    return Advice(remedies, cheapest, combined, list(trials.failures.items()), hints(job, fit))


def hints(job: Job, fit: Fit) -> list[str]:
    """Return hints: parameters dominate the peak, or offloading, which is not tried, may help."""
    if job.mode != "train":
        return []
    found = []
    trained = sum(fit.by_class_bytes.get(k, 0) for k in ("parameters", "gradients", "optimizer_state"))
    if trained > OPTIONS.dominant * fit.peak_bytes:
        found.append(
            f"{trained / fit.peak_bytes:.0%} of the peak load are parameters, their gradients and optimizer "
            "state: training fewer of them (frozen layers, LoRA) makes gradients and state smaller"
        )
    if fit.fits is False and job.device == "cuda":
        found.append("offloading to the host is not tried: plan it by `mempool swap` on the file of --trace")
    return found


class Trials:
    """Fake runs of changed jobs, each cached.

    Args:
        job: the job to change.
        fit: result of the unchanged job.
        until: processor time of the process, in seconds, after which no run starts.
        progress: called with the name of each trial.

    Attributes:
        failures: reasons of the changes that could not be tried, by name.
    """

    def __init__(self, job: Job, fit: Fit, until: float, progress: Callable[[str], object]) -> None:
        self.job, self.fit, self.progress, self._until = job, fit, progress, until
        self._runs: dict[frozenset[str], Fit | None] = {frozenset(): fit}
        self.failures: dict[str, str] = {}

    def try_weakest(self, strengths: Strengths) -> TriedRemedy | None:
        """Try a change in the weakest sufficient strength; return None if no strength could be tried."""
        found = None
        for change in strengths:
            found = self.try_changes([change]) or found
            if found is not None and found.fits is not False:
                break
        return found

    def try_changes(self, changes: Sequence[Change]) -> TriedRemedy | None:
        """Try changes of different kinds together; return None if they could not be tried."""
        made = self._run([change for change in changes if change.allocator is None])
        return None if made is None else self._remedy(changes, made)

    def _run(self, changes: Sequence[Change]) -> Fit | None:
        key = frozenset(change.name for change in changes)
        if key in self._runs:
            return self._runs[key]
        name, self._runs[key] = " + ".join(change.name for change in changes), None
        if time.process_time() > self._until:
            self.failures[name] = "no time is left"
            return None
        self.progress(name)
        try:
            job = applied(self.job, changes)
            self._runs[key] = estimate(job, self.fit.limit_bytes, allocators=(self.fit.allocator,))
        except Exception as error:
            self.failures[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return self._runs[key]

    def _remedy(self, changes: Sequence[Change], made: Fit) -> TriedRemedy:
        before, limit = self.fit, self.fit.limit_bytes
        allocator = next((change.allocator for change in changes if change.allocator), before.allocator)
        held = made.reserved_bytes.get(allocator)
        if held is None:
            held = made.reserved_bytes[allocator] = reserved(made.trace, [allocator])[allocator]
        needed = held + sum(made.margin_bytes.values())
        return TriedRemedy(
            name=" + ".join(change.name for change in changes),
            saves_bytes=before.needed_bytes - needed,
            how="; ".join(change.how for change in changes),
            code="\n".join(change.code for change in changes),
            needed_bytes=needed,
            peak_bytes=made.peak_bytes,
            fits=None if limit is None else needed <= limit,
            cost=max(change.cost for change in changes).name.lower(),
            parts=tuple(change.name for change in changes),
        )


def cheapest_of(
    trials: Trials, alone: Sequence[tuple[Strengths, TriedRemedy]]
) -> tuple[TriedRemedy | None, TriedRemedy | None]:
    """Add useful changes, the cheapest first, until the job fits; then drop unneeded changes.

    So the result has no expensive change if cheaper changes suffice, no superfluous change with a cost, and
    the weakest sufficient strengths.

    Args:
        trials: runs of the job.
        alone: (strengths of a change, result of the change alone) of each change.

    Returns:
        The changes that make the job fit, or None; and if None, the changes that save most without changing
        the training.
    """
    chosen: dict[str, Strengths] = {}
    best: TriedRemedy | None = None
    same: TriedRemedy | None = None
    for strengths, own in sorted(alone, key=lambda pair: (pair[0][-1].cost, -pair[1].saves_bytes)):
        strongest = strengths[-1]
        if strongest.cost is Cost.TRAINING:
            same = same or best
        if best is None and own.saves_bytes <= 0:
            continue  # useless as long as the peak is the same
        kinds = {**chosen, strongest.kind: strengths}
        tried = trials.try_changes([each[-1] for each in kinds.values()])
        if tried is None or tried.saves_bytes <= (best.saves_bytes if best else 0):
            continue
        chosen, best = kinds, tried
        if best.fits:
            return _reduced(trials, list(chosen.values())), None
    return None, same or best


def _reduced(trials: Trials, chosen: list[Strengths]) -> TriedRemedy | None:
    """Drop unneeded changes of a fitting combination, the most expensive first, and weaken the others."""
    left = [strengths[-1] for strengths in sorted(chosen, key=lambda each: -each[-1].cost)]
    for strengths in sorted(chosen, key=lambda each: -each[-1].cost):
        others = [change for change in left if change.kind != strengths[-1].kind]
        for weaker in ((), *((change,) for change in strengths[:-1])):
            kept = [*others, *weaker]
            if kept and (tried := trials.try_changes(kept)) is not None and tried.fits:
                left = kept
                break
    return trials.try_changes(left)

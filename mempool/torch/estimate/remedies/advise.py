"""Search for remedies by fake runs of changed jobs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mempool.torch.estimate.fake.isolation import shared_isolation
from mempool.torch.estimate.options import OPTIONS
from mempool.torch.estimate.remedies.changes import changes_of
from mempool.torch.estimate.remedies.trials import Trials, cheapest_of
from mempool.torch.estimate.result import Advice, Fit

if TYPE_CHECKING:
    from collections.abc import Callable

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
    return Advice(remedies, cheapest, combined, trials.failures(), hints(job, fit))


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

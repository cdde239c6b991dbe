"""Search for remedies: each change is tried by a fake run, never guessed."""

from __future__ import annotations

import copy
import time
import weakref
from typing import TYPE_CHECKING

from torch._subclasses.fake_tensor import FakeTensor

from mempool.torch.estimate.fake.isolation import shared_isolation
from mempool.torch.estimate.options import OPTIONS
from mempool.torch.estimate.remedies.changes import Cost, ladders
from mempool.torch.estimate.remedies.job_traits import inspect_job
from mempool.torch.estimate.remedies.offloading import can_offload, offload_remedy, plan_offload
from mempool.torch.estimate.remedies.trials import Trials, cheapest_of, combined_with_offload
from mempool.torch.estimate.result import Advice, Fit, OffloadFindings, TriedRemedy

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from mempool.torch.estimate.job import Job


@shared_isolation()
def advise(
    job: Job,
    fit: Fit,
    *,
    most_runs: int = OPTIONS.remedy_runs,
    most_seconds: float = OPTIONS.remedy_seconds,
    progress: Callable[[str], object] = lambda _: None,
) -> Advice:
    """Try remedies for a job, alone and together.

    Args:
        job: the job; the job and the model from which the job was made stay unchanged.
        fit: result of the job's fake run.
        most_runs: largest number of runs of changed jobs; remaining changes are not tried.
        most_seconds: processor seconds after which no further run begins.
        progress: called with the name of each trial.

    Raises:
        UsageError: ``fit`` belongs to a job that cannot be tried.
    """
    job = _with_separate_models(job)
    until = time.process_time() + most_seconds
    offload, refused = _plan_offload(job, fit, most_runs, until, progress)
    trials = Trials(job, fit, most_runs - can_offload(job), until, progress)
    alone = [(ladder, trials.try_ladder(ladder)) for ladder in ladders(job, inspect_job(job))]
    kept = [(ladder, remedy) for ladder, remedy in alone if remedy is not None]
    remedies = sorted(
        (remedy for _, remedy in kept if remedy.saves_bytes > 0), key=lambda h: (-h.saves_bytes, h.name)
    )
    cheapest = combined = None
    if fit.fits is False:
        cheapest, combined = cheapest_of(trials, kept)
    if offload is not None:
        remedy = offload_remedy(offload, fit)
        if remedy.saves_bytes > 0:
            remedies = sorted([*remedies, remedy], key=lambda h: (-h.saves_bytes, h.name))
        if fit.fits is False and offload.fits and (cheapest is None or _costs_more_than_offload(cheapest)):
            cheapest, combined = remedy, None
        elif fit.fits is False and (cheapest is None or Cost[cheapest.cost.upper()] is Cost.TRAINING):
            both = combined_with_offload(trials, kept)
            cheapest, combined = (both, None) if both is not None else (cheapest, combined)
    failed = [*refused, *trials.failures()]
    return Advice(remedies, cheapest, combined, failed, estimates(job, fit, offload), offload)


def _costs_more_than_offload(remedy: TriedRemedy) -> bool:
    """Return whether a remedy costs as much as swapping or more; at equal cost the swap plan is better."""
    return Cost[remedy.cost.upper()] >= Cost.TRANSFERS


def _plan_offload(
    job: Job, fit: Fit, most_runs: int, until: float, progress: Callable[[str], object]
) -> tuple[OffloadFindings | None, list[tuple[str, str]]]:
    """Return the findings of the swap planner, or the reason why swapping was not planned."""
    if not can_offload(job):
        return None, []
    if most_runs <= 0 or time.process_time() > until:
        return None, [("swapping", "no runs are left" if most_runs <= 0 else "no time is left")]
    progress("swapping")
    try:
        return plan_offload(job, fit), []
    except Exception as error:
        return None, [("swapping", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")]


def _with_separate_models(job: Job) -> Job:
    """Return the job with a separate fake model for each call, if the job always gives the same fake model.

    A real model is copied by the code that runs the job.
    """
    models_made: list[weakref.ref[nn.Module]] = []

    def make() -> nn.Module:
        model = job.model()
        if any(ref() is model for ref in models_made):
            fake = all(isinstance(parameter, FakeTensor) for parameter in model.parameters())
            return copy.deepcopy(model) if fake else model
        models_made.append(weakref.ref(model))
        return model

    return job.replace(model=make)


def estimates(job: Job, fit: Fit, offload: OffloadFindings | None = None) -> list[str]:
    """Return sentences on useless swapping and on dominant parameters; empty except in training."""
    if job.mode != "train":
        return []
    found = []
    if offload is not None and fit.peak_bytes - offload.floor_bytes < OPTIONS.no_saving * fit.peak_bytes:
        found.append(
            f"swapping gains nothing: the peak is the working set of operation {offload.floor_operation}"
        )
    trained = sum(fit.by_class_bytes.get(k, 0) for k in ("parameters", "gradients", "optimizer_state"))
    if trained > OPTIONS.dominant * fit.peak_bytes:
        found.append(
            f"{trained / fit.peak_bytes:.0%} of the peak load are parameters, their gradients and optimizer "
            "state: training fewer of them (frozen layers, LoRA) makes gradients and state smaller"
        )
    return found

"""Search for remedies: each change is tried by a fake run, never guessed."""

from __future__ import annotations

import copy
import time
import weakref
from typing import TYPE_CHECKING

from torch._subclasses.fake_tensor import FakeTensor

from mempool.torch.estimate.fake.isolation import together
from mempool.torch.estimate.remedies.applicability import look
from mempool.torch.estimate.remedies.changes import Cost, ladders
from mempool.torch.estimate.remedies.offloading import as_help, swappable, swapping
from mempool.torch.estimate.remedies.trials import Trials, cheapest_of, with_swapping
from mempool.torch.estimate.result import Fit, Help, Helps, Swapping

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from mempool.torch.estimate.job import Job


#: Largest number of runs of changed jobs, and processor seconds after which no further run begins.
MOST_RUNS, MOST_SECONDS = 60, 120.0


@together()
def what_would_help(
    job: Job,
    fit: Fit,
    *,
    largest: bool = False,
    most_runs: int = MOST_RUNS,
    most_seconds: float = MOST_SECONDS,
    told: Callable[[str], object] = lambda _: None,
) -> Helps:
    """Try remedies for a job, alone and together.

    Args:
        job: the job; the job and the model from which the job was made stay unchanged.
        fit: result of the job's fake run.
        largest: whether to search the largest batch for each remedy, which takes some runs each.
        most_runs: largest number of runs of changed jobs; remaining changes are not tried.
        most_seconds: processor seconds after which no further run begins.
        told: called with the name of each trial.

    Raises:
        UsageError: ``fit`` belongs to a job that cannot be tried.
    """
    job = _separate(job)
    until = time.process_time() + most_seconds
    swapped, refused = _swapping(job, fit, most_runs, until, told)
    trials = Trials(job, fit, most_runs - swappable(job), until, told)
    alone = [(ladder, trials.alone(ladder)) for ladder in ladders(job, look(job))]
    kept = [(ladder, one) for ladder, one in alone if one is not None]
    remedies = sorted((one for _, one in kept if one.saves_bytes > 0), key=lambda h: (-h.saves_bytes, h.name))
    cheapest = combined = None
    if fit.fits is False:
        cheapest, combined = cheapest_of(trials, kept)
    if largest and fit.limit_bytes is not None:
        remedies = [trials.with_largest(one) for one in remedies]
        cheapest = cheapest and trials.with_largest(cheapest)
    if swapped is not None:
        help_ = as_help(swapped, fit)
        if help_.saves_bytes > 0:
            remedies = sorted([*remedies, help_], key=lambda h: (-h.saves_bytes, h.name))
        if fit.fits is False and swapped.fits and (cheapest is None or _dearer(cheapest)):
            cheapest, combined = help_, None
        elif fit.fits is False and (cheapest is None or Cost[cheapest.cost.upper()] is Cost.TRAINING):
            both = with_swapping(trials, kept)
            cheapest, combined = (both, None) if both is not None else (cheapest, combined)
    failed = [*refused, *trials.failed()]
    return Helps(remedies, cheapest, combined, failed, estimates(job, fit, swapped), swapped)


def _dearer(help_: Help) -> bool:
    """Return whether a remedy costs as much as swapping or more; at equal cost the swap plan is better."""
    return Cost[help_.cost.upper()] >= Cost.TRANSFERS


def _swapping(
    job: Job, fit: Fit, most_runs: int, until: float, told: Callable[[str], object]
) -> tuple[Swapping | None, list[tuple[str, str]]]:
    """Return the findings of the swap planner, or the reason why swapping was not planned."""
    if not swappable(job):
        return None, []
    if most_runs <= 0 or time.process_time() > until:
        return None, [("swapping", "no runs are left" if most_runs <= 0 else "no time is left")]
    told("swapping")
    try:
        return swapping(job, fit), []
    except Exception as error:
        return None, [("swapping", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")]


def _separate(job: Job) -> Job:
    """Return the job with a separate fake model for each call, if the job always gives the same fake model.

    A real model is copied by the code that runs the job.
    """
    met: list[weakref.ref[nn.Module]] = []

    def make() -> nn.Module:
        model = job.model()
        if any(ref() is model for ref in met):
            fake = all(isinstance(parameter, FakeTensor) for parameter in model.parameters())
            return copy.deepcopy(model) if fake else model
        met.append(weakref.ref(model))
        return model

    return job.but(model=make)


#: Shares of the peak: a saving below `LITTLE` counts as none; a part above `MUCH` dominates.
LITTLE, MUCH = 0.01, 0.5


def estimates(job: Job, fit: Fit, swapped: Swapping | None = None) -> list[str]:
    """Return sentences on useless swapping and on dominant parameters; empty except in training."""
    if job.mode != "train":
        return []
    found = []
    if swapped is not None and fit.peak_bytes - swapped.floor_bytes < LITTLE * fit.peak_bytes:
        found.append(
            f"swapping gains nothing: the peak is the working set of operation {swapped.floor_operation}"
        )
    trained = sum(fit.by_class_bytes.get(k, 0) for k in ("parameters", "gradients", "optimizer_state"))
    if trained > MUCH * fit.peak_bytes:
        found.append(
            f"{trained / fit.peak_bytes:.0%} of the peak load are parameters, their gradients and optimizer "
            "state: training fewer of them (frozen layers, LoRA) makes gradients and state smaller"
        )
    return found

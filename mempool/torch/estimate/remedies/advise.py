"""Search for remedies: each change is tried by a fake run, never guessed."""

from __future__ import annotations

import copy
import time
import weakref
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch._subclasses.fake_tensor import FakeTensor

from mempool.torch.estimate.fake.isolation import together as made_together
from mempool.torch.estimate.remedies.applicability import look
from mempool.torch.estimate.remedies.changes import Cost, ladders
from mempool.torch.estimate.remedies.cheapest import cheapest_of
from mempool.torch.estimate.remedies.hints import estimates
from mempool.torch.estimate.remedies.offloading import as_help, swappable, swapping
from mempool.torch.estimate.remedies.trials import Trials
from mempool.torch.estimate.remedies.with_offloading import with_swapping

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from mempool.torch.estimate.fit import Fit
    from mempool.torch.estimate.remedies.offloading import Swapping
    from mempool.torch.estimate.remedies.trials import Help
    from mempool.torch.estimate.training_step import Job

_H = TypeVar("_H", "Help", "Swapping")
#: Largest number of runs of changed jobs, and processor seconds after which no further run begins.
MOST_RUNS, MOST_SECONDS = 60, 120.0


@dataclass(frozen=True)
class Helps:
    """Remedies for a job.

    Attributes:
        remedies: changes that save memory alone, largest saving first.
        cheapest: the cheapest changes, by `Cost`, that together make the job fit; None if the job fits
            already, no combination suffices, or no limit is given.
        together: all changes that leave the training as it is, if even they do not suffice.
        not_tried: name of each change that could not be tried, with the reason.
        hints: further advice.
        swapping: findings of the swap planner, also among the remedies; None if swapping was not planned.
    """

    remedies: list[Help] = field(default_factory=list)
    cheapest: Help | None = None
    together: Help | None = None
    not_tried: list[tuple[str, str]] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)
    swapping: Swapping | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary ready for JSON."""
        return asdict(self)

    def without_verdicts(self) -> Helps:
        """Return the same without claims to fit, for a job of which only a part was seen."""
        return replace(
            self,
            remedies=[_open(one) for one in self.remedies],
            cheapest=self.cheapest and _open(self.cheapest),
            swapping=self.swapping and _open(self.swapping),
        )


def _open(one: _H) -> _H:
    return replace(one, fits=None) if one.fits else one


@made_together()
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
    cheapest = together = None
    if fit.fits is False:
        cheapest, together = cheapest_of(trials, kept)
    if largest and fit.limit_bytes is not None:
        remedies = [trials.with_largest(one) for one in remedies]
        cheapest = cheapest and trials.with_largest(cheapest)
    if swapped is not None:
        help_ = as_help(swapped, fit)
        if help_.saves_bytes > 0:
            remedies = sorted([*remedies, help_], key=lambda h: (-h.saves_bytes, h.name))
        if fit.fits is False and swapped.fits and (cheapest is None or _dearer(cheapest)):
            cheapest, together = help_, None
        elif fit.fits is False and (cheapest is None or Cost[cheapest.cost.upper()] is Cost.TRAINING):
            both = with_swapping(trials, kept)
            cheapest, together = (both, None) if both is not None else (cheapest, together)
    failed = [*refused, *trials.failed()]
    return Helps(remedies, cheapest, together, failed, estimates(job, fit, swapped), swapped)


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

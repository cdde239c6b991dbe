"""What cannot be tried on a job, but said of it: offloading at its best, and where parameters dominate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mempool.torch.fitting.helps.away import away
from mempool.torch.fitting.measure import ROUNDED_TO
from mempool.torch.fitting.shares import rounded
from mempool.torch.fitting.text import size

if TYPE_CHECKING:
    from mempool.torch.fitting.fit import Fit
    from mempool.torch.fitting.job import Job

#: Of the peak: what is less is not worth a word, and what is more dominates.
LITTLE, MUCH = 0.01, 0.5


def estimates(job: Job, fit: Fit) -> list[str]:
    """Sentences on offloading, in training, and on parameters that dominate."""
    if job.mode != "train":
        return []
    trace = rounded(fit.trace, ROUNDED_TO[job.device])
    found = []
    for category, what in (("activations", "activations"), ("optimizer_state", "the optimizer's state")):
        best = away(trace, category)
        if best.saves_bytes > LITTLE * fit.peak_bytes:
            found.append(
                f"offloading {what} saves at most {size(best.saves_bytes)} of the peak load, by "
                f"{size(best.moved_bytes)} each way in a step: an estimate, for copies that are never late"
            )
        elif best.held_bytes > LITTLE * fit.peak_bytes:
            where = f"{fit.peak_operation} in {fit.peak_module}" if fit.peak_module else fit.peak_operation
            found.append(f"offloading {what} gains nothing: the peak is the working set of {where}")
    trained = sum(fit.by_class_bytes.get(k, 0) for k in ("parameters", "gradients", "optimizer_state"))
    if trained > MUCH * fit.peak_bytes:
        found.append(
            f"{trained / fit.peak_bytes:.0%} of the peak load are parameters, their gradients and optimizer "
            "state: training fewer of them (frozen layers, LoRA) makes gradients and state smaller"
        )
    return found

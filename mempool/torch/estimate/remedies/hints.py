"""Hints without a trial: swapping that gains nothing, and parameters that dominate the peak."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mempool.torch.estimate.fit import Fit
    from mempool.torch.estimate.remedies.offloading import Swapping
    from mempool.torch.estimate.training_step import Job

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

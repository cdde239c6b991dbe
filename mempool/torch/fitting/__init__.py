"""Estimate of whether a model fits before the run: a training step on tensors without memory.

`job.py` defines the step, `run.py` does the fake run, `fit.py` makes the result, `batches.py` searches batch
sizes.
"""

from mempool.torch.fitting.batches import largest_batch
from mempool.torch.fitting.fit import Fit, fit, fit_job
from mempool.torch.fitting.job import Job
from mempool.torch.fitting.run import run
from mempool.torch.fitting.shares import ModuleShare

__all__ = ["Fit", "Job", "ModuleShare", "fit", "fit_job", "largest_batch", "run"]

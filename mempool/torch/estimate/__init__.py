"""Estimate of whether a model fits before the run: a training step on tensors without memory.

`job.py` defines the step, `run.py` does the fake run, `fit.py` makes the result, `batches.py` searches batch
sizes.
"""

from mempool.torch.estimate.attribution import ModuleShare
from mempool.torch.estimate.fake.fake_run import run
from mempool.torch.estimate.fit import Fit, fit, fit_job
from mempool.torch.estimate.largest_batch import largest_batch
from mempool.torch.estimate.training_step import Job

__all__ = ["Fit", "Job", "ModuleShare", "fit", "fit_job", "largest_batch", "run"]

"""Estimate of a step's memory before the run, by a training step on tensors without memory.

`job` defines a step; `fake` runs the step without memory; `device` emulates a device's buffers; `estimator`
makes the result; `remedies` searches for changes that make a job fit; `sources` has models, optimizers and
losses by name; `program` runs programs; `fit` has the functions for users.
"""

from mempool.torch.estimate.attribution import ModuleShare
from mempool.torch.estimate.fake.fake_run import run
from mempool.torch.estimate.fit import fit, fit_job
from mempool.torch.estimate.job import Job
from mempool.torch.estimate.result import Fit

__all__ = ["Fit", "Job", "ModuleShare", "fit", "fit_job", "run"]

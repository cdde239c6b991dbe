"""Estimate of whether a model fits before the run: a training step on tensors without memory.

`job` defines a step, `fake` runs it without memory, as `device` would; `estimator` makes the result,
`remedies` advises on it, `sources` has models, optimizers and losses by name, `program` runs programs, and
`fit` has the functions that users call.
"""

from mempool.torch.estimate.attribution import ModuleShare
from mempool.torch.estimate.fake.fake_run import run
from mempool.torch.estimate.fit import fit, fit_job
from mempool.torch.estimate.job import Job
from mempool.torch.estimate.result import Fit

__all__ = ["Fit", "Job", "ModuleShare", "fit", "fit_job", "run"]

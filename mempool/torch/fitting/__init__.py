"""Whether a model fits, told before it runs: a step on tensors without memory, and what it says.

`job.py` is what is tried, `run.py` tries it, `fit.py` says what came of it, `batches.py` tries other batches.
"""

from mempool.torch.fitting.batches import largest_batch
from mempool.torch.fitting.fit import Fit, fit, fit_job
from mempool.torch.fitting.job import Job
from mempool.torch.fitting.run import run
from mempool.torch.fitting.shares import ModuleShare

__all__ = ["Fit", "Job", "ModuleShare", "fit", "fit_job", "largest_batch", "run"]

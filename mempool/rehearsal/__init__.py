"""Rehearsals: run a CUDA program of PyTorch's without a GPU, and measure its memory.

    from mempool.rehearsal import Job, Machine, open_runner

    with open_runner() as runner:
        job = Job(("train.py", "--batch_size=8"), str(runner.new_folder()))
        print(runner.run(job, Machine()).peak_reserved_bytes)

PyTorch's CUDA build runs for real. The libraries of CUDA below it are a stand-in: memory is address space,
and kernels do nothing.
"""

from mempool.rehearsal.job import ALLOCATORS, Job, Outcome
from mempool.rehearsal.rehearse import Machine, StandInRunner, open_runner

__all__ = ["ALLOCATORS", "Job", "Machine", "Outcome", "StandInRunner", "open_runner"]

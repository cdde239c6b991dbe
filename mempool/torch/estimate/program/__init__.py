"""Fake runs of unchanged programs, for builds of PyTorch without CUDA, which cannot be rehearsed."""

from mempool.torch.estimate.program.run import ProgramRun, run_program

__all__ = ["ProgramRun", "run_program"]

"""Unchanged programs on tensors without memory, where PyTorch has no CUDA and so cannot be rehearsed."""

from mempool.torch.estimate.program.run import ProgramRun, run_program

__all__ = ["ProgramRun", "run_program"]

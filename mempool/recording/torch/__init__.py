"""Recorder of the allocations, accesses and frees of PyTorch's operations, on real or fake tensors."""

from mempool.recording.torch.recorder import AccessRecorder

__all__ = ["AccessRecorder"]

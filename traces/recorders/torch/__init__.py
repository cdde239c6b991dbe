"""What PyTorch's operations allocate, read, write and let go, real tensors or fake ones."""

from traces.recorders.torch.recorder import AccessRecorder

__all__ = ["AccessRecorder"]

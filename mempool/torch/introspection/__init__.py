"""Statistics, snapshots and diagnosis of PyTorch's memory while a pool serves its tensors."""

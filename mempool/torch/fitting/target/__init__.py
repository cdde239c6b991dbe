"""What a CUDA device would do in another way, on fake tensors of the CPU: `as_on`."""

"""Emulation of a CUDA device's memory use on fake tensors of the CPU: `as_on`."""

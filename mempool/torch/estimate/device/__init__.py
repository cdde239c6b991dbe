"""Emulation of a CUDA device's memory use on fake tensors of the CPU: `emulate_device`."""

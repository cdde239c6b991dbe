"""Rehearsals: run a CUDA program of PyTorch's on a machine without a GPU, and measure the memory that it would hold."""

"""Graphs of PyTorch rewritten so that a step fits."""

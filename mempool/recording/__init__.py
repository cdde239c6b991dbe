"""Recorders: memory events of pools, of arrays of NumPy and CuPy, and of PyTorch operations, as traces."""

"""Recorders: they write memory events of pools and of PyTorch's operations as traces."""

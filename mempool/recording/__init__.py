"""Recorders, which write the memory events of pools and of PyTorch's operations as traces."""

"""Fake runs: a training step on tensors without memory."""

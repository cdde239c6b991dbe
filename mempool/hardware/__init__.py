"""Figures of GPUs by name: usable memory, peak throughput, and a roofline model of operations."""

"""Copies between device and host for eager and compiled offloading: engines, host memory, the link."""

"""Copies between device and host, shared by eager and compiled offloading: engines, host memory, the link."""

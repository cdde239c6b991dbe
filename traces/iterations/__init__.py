"""Recurring iterations of a trace: detection, windows, and the lifetime of each buffer."""

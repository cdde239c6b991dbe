"""Packing: offsets for buffers with known lifetimes, lower bounds, and an independent checker."""

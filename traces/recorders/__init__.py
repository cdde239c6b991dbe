"""Recorders of traces for programs without a pool: one module per framework, which that module imports."""

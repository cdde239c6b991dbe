"""Rewriting of a step's graph so that it fits: swaps and recomputation put into it, decided by simulation."""

from solvers.rewriting.graph import Graph, Role

__all__ = ["Graph", "Role"]

"""Rewriting of a step's graph to fit a limit by offloading and recompute, decided by simulation."""

from solvers.rewriting.graph import Graph, Role
from solvers.rewriting.rewrite import erase, rewrite
from solvers.rewriting.rewriting import Rewriting, Swap, SwapIn, Sync

__all__ = ["Graph", "Rewriting", "Role", "Swap", "SwapIn", "Sync", "erase", "rewrite"]

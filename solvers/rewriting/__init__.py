"""Rewriting of a step's graph to fit a limit by offloading and recompute, decided by simulation."""

from solvers.rewriting.apply import apply_rewriting
from solvers.rewriting.graph import Graph, Role
from solvers.rewriting.records import Offload, Reload, Rewriting

__all__ = ["Graph", "Offload", "Reload", "Rewriting", "Role", "apply_rewriting"]

"""Buffers in, plans out: bounds, solvers, and the checker that trusts none of them."""

from solvers.bounds import load_curve, lower_bound, peak_load
from solvers.check import check
from solvers.errors import PlanError
from solvers.plan import Plan, Status, Stop
from solvers.progress import Progress
from solvers.registry import SOLVERS
from solvers.solve import solve
from solvers.store import read_plan, read_plan_columns, write_plan

__all__ = [
    "SOLVERS",
    "Plan",
    "PlanError",
    "Progress",
    "Status",
    "Stop",
    "check",
    "load_curve",
    "lower_bound",
    "peak_load",
    "read_plan",
    "read_plan_columns",
    "solve",
    "write_plan",
]

"""Buffers in, plans out: bounds, solvers, and the checker that trusts none of them."""

from solvers.errors import PlanError
from solvers.packing.bounds import load_curve, lower_bound, peak_load
from solvers.packing.check import check
from solvers.packing.plan import Plan, Status, Stop
from solvers.packing.plan_files import read_plan, read_plan_columns, write_plan
from solvers.packing.progress import Progress
from solvers.packing.registry import SOLVERS
from solvers.packing.solve import solve

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

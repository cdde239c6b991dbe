"""The solvers by name. A new solver is a file with a function of a task, and a line here."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping

from solvers import branching, exact, greedy
from solvers.task import Task

#: Up to this many jobs "auto" asks the exact solver when the heuristics leave a gap,
FEW = 60
#: for one of CP-SAT's deterministic seconds per so many nodes of the budget.
_NODES_A_SECOND = 100_000_000

Solver = Callable[[Task], None]


def auto(task: Task) -> None:
    """Valleys in a few orders, then the searches in turn; last, for few jobs, the exact solver."""
    order = greedy.valleys(task)
    if order is not None:
        branching.take_turns(task, order)
    if len(task.jobs) <= FEW and task.stopped_by in ("nodes", "time") and exact.available():
        exact.prove(task, _NODES_A_SECOND)


SOLVERS: Mapping[str, Solver] = types.MappingProxyType(
    {
        "auto": auto,
        "greedy": greedy.greedy,
        "first_fit": greedy.first_fit,
        "best_fit": greedy.best_fit,
        "exact": exact.exact,
    }
)

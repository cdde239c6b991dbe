"""Exact solver for small problems: rectangles of fixed times and free offsets on OR-Tools' CP-SAT."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from solvers.packing.greedy import run_heuristics
from solvers.packing.options import OPTIONS
from traces.columns import numbered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from solvers.packing.task import Task

#: Largest arena in units of the greatest common divisor; larger values overflow the areas of the model.
_MOST_UNITS = 2**40


def available() -> bool:
    """Return whether OR-Tools is installed, without importing the package."""
    return importlib.util.find_spec("ortools") is not None


def exact(task: Task) -> None:
    """Solve to proven optimality or until a limit, starting from the best plan of the quick heuristics.

    Raises:
        ModuleNotFoundError: OR-Tools is not installed.
    """
    if run_heuristics(task):
        prove(task)


def prove(task: Task, nodes_a_second: int = OPTIONS.exact_nodes_per_second) -> None:
    """Improve the task's offsets until they are proven optimal or a limit is reached."""
    unit = task.jobs.unit
    if task.offsets is None or unit * _MOST_UNITS < task.arena or len(task.jobs) > OPTIONS.exact_jobs:
        task.stopped_by = "finished"
        return
    cp_model = None if task.done(check_nodes=False) else _import(task)
    if cp_model is None:
        return
    try:
        model = _Model(cp_model, task, unit)
    except _StoppedError:
        return
    budget = task.budget.stop.node_budget
    model.run(task, None if budget is None else budget / nodes_a_second)


def _import(task: Task) -> Any:
    """Import and return OR-Tools' CP-SAT module (takes a second), or None if a limit is reached first.

    Ctrl-C during the import would raise ImportError, so the import runs on a thread that receives no signals.
    """
    modules, errors, ended = list[Any](), list[BaseException](), threading.Event()

    def work() -> None:
        try:
            modules.append(importlib.import_module("ortools.sat.python.cp_model"))
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    if threading.current_thread() is threading.main_thread():
        threading.Thread(target=work, name="import of OR-Tools").start()
    else:
        work()
    while not ended.wait(OPTIONS.exact_pause):
        if task.done(check_nodes=False):
            return None
    if errors:
        raise errors[0]
    return modules[0]


class _StoppedError(Exception):
    """Raised when a limit is reached while the model is built."""


def _each(task: Task) -> Iterator[int]:
    """Yield the job numbers until a limit is reached, which raises `_StoppedError`."""
    for job in range(len(task.jobs)):
        if job % 500 == 0 and task.done(check_nodes=False):
            raise _StoppedError
        yield job


class _Model:
    """CP-SAT model: one address interval per job, one time interval per piece, disjoint rectangles."""

    def __init__(self, cp_model: Any, task: Task, unit: int) -> None:
        self._cp, self._unit, self._jobs = cp_model, unit, task.jobs
        self.model = cp_model.CpModel()
        most = task.arena // unit
        self._arena = self.model.new_int_var(-(-task.lower_bound // unit), most, "arena")
        self._offsets = [self._place(j, most) for j in _each(task)]
        self.model.add_no_overlap_2d(*self._rectangles(task))
        self.model.minimize(self._arena)
        for var, offset in zip(self._offsets, task.offsets if task.offsets is not None else (), strict=True):
            if isinstance(var, cp_model.IntVar):
                self.model.add_hint(var, int(offset) // unit)
        self.model.add_hint(self._arena, most)

    def _place(self, job: int, most: int) -> Any:
        """Return the offset of a job in units, as a variable or, if fixed, as a number."""
        size, fixed = int(self._jobs.size[job]) // self._unit, int(self._jobs.fixed[job])
        if fixed >= 0:
            return fixed // self._unit
        offset = self.model.new_int_var(0, most - size, f"offset{job}")
        if (step := int(self._jobs.alignment[job]) // self._unit) > 1:
            multiple = self.model.new_int_var(0, (most - size) // step, f"multiple{job}")
            self.model.add(offset == step * multiple)
        self.model.add(offset + size <= self._arena)
        return offset

    def _rectangles(self, task: Task) -> tuple[list[Any], list[Any]]:
        jobs, model = self._jobs, self.model
        ranks = numbered(np.stack([jobs.start, jobs.end]))[1]
        spans = [
            model.new_fixed_size_interval_var(
                self._offsets[j], int(jobs.size[j]) // self._unit, f"addresses{j}"
            )
            for j in _each(task)
        ]
        times = [
            model.new_fixed_size_interval_var(int(a), int(b - a), f"time{k}")
            for k, (a, b) in enumerate(zip(*ranks, strict=True))
        ]
        owner = np.repeat(np.arange(len(jobs)), jobs.pieces)
        return times, [spans[j] for j in owner]

    def run(self, task: Task, deterministic_seconds: float | None) -> None:
        """Solve on a separate thread, so that the calling thread can watch the limits and Ctrl-C."""
        solver, solutions = self._cp.CpSolver(), _Solutions(self._cp, self._offsets)
        solver.parameters.random_seed = task.seed % 2**31
        solver.parameters.catch_sigint_signal = False
        if deterministic_seconds is not None:
            solver.parameters.num_workers = 1
            solver.parameters.max_deterministic_time = deterministic_seconds
        else:
            solver.parameters.num_workers = min(os.cpu_count() or 1, 8)
        status: list[Any] = []
        ended = threading.Event()  # Ctrl-C in Thread.join() would make it believe that the thread has ended

        def work() -> None:
            try:
                status.append(solver.solve(self.model, solutions.callback))
            finally:
                ended.set()

        threading.Thread(target=work, name="cp-sat", daemon=True).start()
        try:
            self._watch(task, solver, solutions, ended)
        finally:
            while not ended.wait(OPTIONS.exact_pause):
                solver.stop_search()  # repeated: a stop before the search has begun is lost
            self._offer(task, solutions)
        self._conclude(task, solver, status)

    def _watch(self, task: Task, solver: Any, solutions: _Solutions, ended: threading.Event) -> None:
        pause = 0.001
        while not ended.wait(pause):
            pause = min(2 * pause, OPTIONS.exact_pause)
            self._offer(task, solutions)
            if task.budget.reached_limit(check_nodes=False) or (task.arena <= task.target):
                solver.stop_search()

    def _offer(self, task: Task, solutions: _Solutions) -> None:
        for units in solutions.take():
            offsets = np.array(units, np.int64) * self._unit
            task.offer(offsets, int((offsets + self._jobs.size).max()))

    def _conclude(self, task: Task, solver: Any, status: list[Any]) -> None:
        if not status:  # the thread died of an exception and has printed the exception
            raise RuntimeError("CP-SAT failed")
        bound = math.ceil(solver.best_objective_bound - 1e-6) * self._unit
        if status[0] == self._cp.OPTIMAL:
            bound = task.arena
        task.lower_bound = max(task.lower_bound, min(bound, task.arena))
        if task.arena <= task.lower_bound:
            task.stopped_by = "proof"
        elif not task.done():
            task.stopped_by = "nodes"


class _Solutions:
    """Queue of solutions from CP-SAT's thread to the calling thread."""

    def __init__(self, cp_model: Any, variables: list[Any]) -> None:
        self._lock = threading.Lock()
        self._solutions: list[list[int]] = []
        outer = self

        class Callback(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
            def on_solution_callback(self) -> None:
                values = [v if isinstance(v, int) else int(self.value(v)) for v in variables]
                with outer._lock:
                    outer._solutions.append(values)

        self.callback = Callback()

    def take(self) -> list[list[int]]:
        """Return the solutions found since the last call."""
        with self._lock:
            taken, self._solutions = self._solutions, []
        return taken

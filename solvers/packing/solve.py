"""Entry point `solve`: makes a plan for buffers, group by group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from solvers._core import fixed_conflict, write_offsets
from solvers.packing.bounds import Pieces, at, bound_of, pieces_of
from solvers.packing.greedy import run_heuristics
from solvers.packing.jobs import Jobs, jobs_of
from solvers.packing.options import OPTIONS
from solvers.packing.plan import Plan, Status, Stop
from solvers.packing.portfolio import cores
from solvers.packing.progress import Budget, Progress, ProgressTotal
from solvers.packing.registry import SOLVERS, auto
from solvers.packing.rotation import Attempts, columns_to_try
from solvers.packing.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from traces.buffers import Buffers

#: Largest number of live instances of one buffer; more count as accumulation, and are refused.
MOST_INSTANCES = 64


def solve(
    buffers: Buffers,
    *,
    capacity: int | None = None,
    stop: Stop | None = None,
    seed: int = 0,
    solver: str = "auto",
    columns: int | None = None,
    threads: int | None = None,
    on_improvement: Callable[[Plan], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Find offsets for all buffers in an arena as small as possible.

    The result is deterministic on one thread: the same buffers, seed and node budget give the same plan,
    unless the clock or an interrupt stopped the solve. Groups are packed one after the other, on top of each
    other. On Ctrl-C the best plan so far is returned.

    Args:
        buffers: the buffers to place. Persistent buffers are left out (offset -1).
        capacity: bytes; accept the first plan that fits. If no plan is found, the returned plan has no
            offsets.
        stop: limits of the solve; the default is a node budget and no clock.
        seed: seed of the search.
        solver: one of `SOLVERS`: "auto" or "greedy" (auto without the complete searches).
        columns: number of iterations after which addresses repeat, at least `Buffers.max_instances`; by
            default a few numbers are tried if a buffer outlives its iteration.
        threads: number of searching threads; by default one with a node limit, and one per core with only a
            clock limit or an interrupt.
        on_improvement: called from this thread with every plan that is better than the last.
        on_progress: called from this thread at checks of the limits, even without a better plan: at most ten
            times a second, first after a tenth of a second.

    Raises:
        ValueError: unknown solver, too few columns or threads, a buffer alive over more than 64 periods,
            sizes that sum to too many bytes.
        KeyboardInterrupt: the user interrupted before any plan was found.
    """
    if solver not in SOLVERS:
        raise ValueError(f"no solver {solver!r}; there are {', '.join(SOLVERS)}")
    if buffers.max_instances > MOST_INSTANCES:
        raise ValueError(f"a buffer lives {buffers.max_instances} periods, more than {MOST_INSTANCES}")
    if columns is not None and columns < buffers.max_instances:
        raise ValueError(
            f"{columns} columns are fewer than the {buffers.max_instances} instances of a buffer"
        )
    stop = stop or Stop()
    if threads is None:
        threads = cores() if stop.node_budget is None else 1
    if threads < 1:
        raise ValueError(f"{threads} threads are too few")
    tried = [columns] if columns else columns_to_try(buffers)
    pieces = pieces_of(buffers)
    request = _Request(buffers, pieces, bound_of(buffers, pieces), capacity, seed, solver, threads)
    return _solve_columns(request, tried, stop, on_improvement, ProgressTotal(on_progress))


@dataclass(frozen=True)
class _Request:
    """Arguments of `solve` that all attempts share; ``bound``: lower bound in bytes for any columns."""

    buffers: Buffers
    pieces: Pieces
    bound: int
    capacity: int | None
    seed: int
    solver: str
    threads: int


def _solve_columns(
    request: _Request,
    tried: list[int],
    stop: Stop,
    on_improvement: Callable[[Plan], None] | None,
    total: ProgressTotal,
) -> Plan:
    """Return the best plan over these numbers of columns; stop at a plan that is good enough."""
    bound, few = request.bound, len(request.buffers) <= OPTIONS.few
    enough = max(stop.target_bytes or 0, request.capacity or 0, bound)
    several = len(tried) > 1
    report = total.callback(lambda attempt: bound if several else attempt)
    if several and request.solver == "auto" and few:
        tried = sorted(tried, key=lambda columns: _estimate_arena(request, columns, stop, total))
    attempts = Attempts(tried, stop, total)

    def better(plan: Plan) -> None:
        best = attempts.best
        if on_improvement is None:
            return
        if best is None or best.offset is None or plan.arena_bytes < best.arena_bytes:
            on_improvement(plan)

    for columns, part in attempts:
        try:
            plan = _Solve(request, columns, part, better if on_improvement else None, report).run()
        except KeyboardInterrupt:
            if attempts.best is None:
                raise
            return attempts.combined(bound, "interrupt")
        total.add(plan)
        attempts.add(columns, plan)
        done = plan.offset is not None and plan.arena_bytes <= enough
        infeasible = plan.status is Status.INFEASIBLE and plan.stopped_by == "bound"
        if done or infeasible or plan.stopped_by == "interrupt":
            break
    return attempts.combined(bound)


def _estimate_arena(request: _Request, columns: int, stop: Stop, total: ProgressTotal) -> int:
    """Return the arena of a short search with this number of columns, used to try promising numbers first."""
    budget, arena = stop.node_budget, 0
    nodes = (
        OPTIONS.estimate_nodes
        if budget is None
        else min(OPTIONS.estimate_nodes, budget // OPTIONS.estimate_share)
    )
    for rows in _groups(request.buffers, request.pieces):
        task = Task(jobs_of(request.buffers.select(rows).unrolled(columns)), Budget(Stop(nodes=nodes)))
        auto(task)
        arena += task.arena
        total.nodes += task.budget.nodes
    return arena


class _Solve:
    """One solve with a fixed number of columns: packs each group, combines the offsets, sets the status."""

    def __init__(
        self,
        request: _Request,
        columns: int,
        stop: Stop,
        on_improvement: Callable[[Plan], None] | None,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._buffers = buffers = request.buffers
        self._request, self._pieces, self._bound = request, request.pieces, request.bound
        self._capacity = request.capacity
        self._on_improvement, self._on_progress = on_improvement, on_progress
        self._budget = Budget(stop, OPTIONS.assembly_seconds * len(buffers) * columns)
        self._target = max(stop.target_bytes or 0, self._capacity or 0)
        # Buffers that are not packed: persistent buffers get -1; buffers without memory keep a fixed offset
        # or get 0.
        self._offset = np.maximum(buffers.offset[:, None], np.zeros(columns, np.int64))
        self._offset[buffers.persistent] = -1
        self._latest: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._groups = _groups(buffers, self._pieces)
        self._arena = 0
        self._refuted = False

    def run(self) -> Plan:
        """Solve group by group and return the plan."""
        if self._capacity is not None and (reason := self._too_small()):
            return self._no_plan(Status.INFEASIBLE, "bound", reason)
        stopped_by = "bound"
        for k, rows in enumerate(self._groups):
            self._budget.share(len(self._groups) - k)
            task = self._task(k, rows)
            if self._on_progress is not None:
                self._budget.report = partial(self._report, task, self._on_progress, k)
            if reason := _contradiction(self._buffers, rows, task.jobs):
                return self._no_plan(Status.INFEASIBLE, "proof", reason)
            self._work(task)
            if task.offsets is None:
                return self._no_plan(Status.UNKNOWN, task.stopped_by, "stopped before there was a plan")
            self._offset = self._with_group(rows, task.jobs, task.offsets)
            self._arena = task.arena
            stopped_by = stopped_by if task.stopped_by == "bound" else task.stopped_by
            if len(self._groups) == 1:
                self._refuted = self._capacity is not None and task.lower_bound > self._capacity
                self._bound = task.lower_bound
        return self._conclude(stopped_by)

    def _task(self, k: int, rows: NDArray[np.int64]) -> Task:
        columns = self._offset.shape[1]
        whole = len(self._groups) == 1 and columns == 1
        buffers = self._buffers if len(rows) == len(self._buffers) else self._buffers.select(rows)
        bound, pieces = (self._bound, self._pieces) if whole else (None, None)
        taken = _taken(self._buffers, self._groups, k, self._offset)
        jobs = jobs_of(buffers.unrolled(columns), bound, taken, pieces)
        last = k == len(self._groups) - 1

        def found(offsets: NDArray[np.int64], arena: int) -> None:
            if self._on_improvement is None or (self._capacity is not None and arena > self._capacity):
                return
            self._on_improvement(self._plan(self._with_group(rows, jobs, offsets), arena, ""))

        # Only the last group may stop at a target; earlier groups are packed as tightly as possible.
        target, capacity = (self._target, self._capacity) if last else (0, None)
        seed, threads = self._request.seed, self._request.threads
        return Task(jobs, self._budget, seed, target, capacity, threads, found if last else None)

    def _report(self, task: Task, on_progress: Callable[[Progress], None], k: int) -> None:
        """Report progress; the arena of all groups is known only when the last group has one."""
        last = k == len(self._groups) - 1
        arena = task.arena if task.offsets is not None and last else None
        bound = task.lower_bound if len(self._groups) == 1 else self._bound
        on_progress(Progress(arena, bound, self._budget.nodes, self._budget.seconds))

    def _work(self, task: Task) -> None:
        try:
            (run_heuristics if self._budget.interrupted else SOLVERS[self._request.solver])(task)
        except KeyboardInterrupt:
            if task.offsets is None:
                raise
            self._budget.interrupted = True
            task.stopped_by = "interrupt"

    def _with_group(self, rows: NDArray[np.int64], jobs: Jobs, found: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the offsets so far with the given group's offsets filled in; the latest result is cached."""
        if self._latest is None or self._latest[0] is not found:
            offset = self._offset.copy()
            write_offsets(offset, rows, jobs.row, found)
            offset.flags.writeable = False  # several plans share this array
            self._latest = found, offset
        return self._latest[1]

    def _conclude(self, stopped_by: str) -> Plan:
        if self._capacity is not None and self._arena > self._capacity:
            if self._refuted:
                return self._no_plan(Status.INFEASIBLE, "proof", self._too_small() or "a search found none")
            found = f"smallest arena found {self._arena} > capacity {self._capacity}"
            return self._no_plan(Status.UNKNOWN, stopped_by, found)
        if stopped_by in ("bound", "proof") and self._arena > self._bound:
            stopped_by = "finished"  # optimal groups do not prove an optimal sum
        return self._plan(self._offset, self._arena, stopped_by)

    def _plan(self, offset: NDArray[np.int64], arena: int, stopped_by: str) -> Plan:
        status = Status.OPTIMAL if arena <= self._bound else Status.FEASIBLE
        return self._make(offset, arena, status, stopped_by, "")

    def _no_plan(self, status: Status, stopped_by: str, reason: str) -> Plan:
        return self._make(None, 0, status, stopped_by, reason)

    def _make(
        self, offset: NDArray[np.int64] | None, arena: int, status: Status, stopped_by: str, reason: str
    ) -> Plan:
        return Plan(
            offset,
            arena,
            self._bound,
            status,
            self._request.solver,
            self._request.seed,
            self._budget.seconds,
            stopped_by,
            self._buffers.period,
            reason,
            self._budget.nodes,
        )

    def _too_small(self) -> str:
        if self._capacity is None or self._bound <= self._capacity:
            return ""
        return f"lower bound {self._bound} > capacity {self._capacity}"


def _groups(buffers: Buffers, pieces: Pieces) -> list[NDArray[np.int64]]:
    """Return rows of the buffers that need memory by group, the coarsest alignment first to save padding.

    With a single group, all rows are returned: rows of buffers that need no memory have no pieces.
    """
    rows = pieces.rows
    if len(rows) == 0:
        return []
    group = at(buffers.group, rows)
    if (group == group[0]).all():
        return [np.arange(len(buffers))]
    order = np.argsort(group, kind="stable")
    ends = np.flatnonzero(np.diff(group[order])) + 1
    groups = [rows[part] for part in np.split(order, ends)]
    return sorted(groups, key=lambda part: -int(buffers.alignment[part].max()))


def _taken(
    buffers: Buffers, groups: list[NDArray[np.int64]], k: int, offset: NDArray[np.int64]
) -> list[tuple[int, int]]:
    """Return address ranges that group k must avoid: earlier groups' buffers, later groups' fixed buffers.

    Without fixed offsets, the result is one range from 0 up to the topmost end.
    """
    before = np.concatenate([np.zeros(0, np.int64), *groups[:k]])
    after = np.concatenate([np.zeros(0, np.int64), *groups[k + 1 :]])
    after = after[buffers.offset[after] >= 0]
    rows = np.concatenate([before, after])
    low, size = offset[rows].ravel(), np.repeat(buffers.size[rows], offset.shape[1])
    if not (buffers.offset >= 0).any():  # no fixed offsets: the next group goes on top
        return [(0, int((low + size).max()))] if len(low) else []
    ranges: list[tuple[int, int]] = []
    for start, length in sorted(zip(low.tolist(), size.tolist(), strict=True)):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], start + length))
        else:
            ranges.append((start, start + length))
    return ranges


def _contradiction(buffers: Buffers, rows: NDArray[np.int64], jobs: Jobs) -> str:
    """Return the reason why the fixed offsets of a group are infeasible, or ""."""
    fixed = np.flatnonzero(jobs.fixed >= 0)
    if len(fixed) == 0:
        return ""
    wrong = fixed[jobs.fixed[fixed] % jobs.alignment[fixed] != 0]
    if len(wrong):
        row = rows[jobs.row[wrong[0]] % len(rows)]
        return f"the fixed offset of buffer {buffers.name(row)} is not a multiple of its alignment"
    pair = fixed_conflict(jobs.native())
    if pair is None:
        return ""
    first, second = (
        "another group" if jobs.row[j] < 0 else f"buffer {buffers.name(rows[jobs.row[j] % len(rows)])}"
        for j in pair
    )
    return f"the fixed offsets of {first} and {second} overlap"

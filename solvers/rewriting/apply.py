"""Application of decisions to a graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from solvers.errors import PlanError
from solvers.rewriting.graph import Role
from solvers.rewriting.runs import Runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.rewriting.graph import Graph
    from solvers.rewriting.records import Offload, Reload, Rewriting

COPY_OPERATORS = ("mempool.offload", "mempool.reload")


def apply_rewriting(graph: Graph, rewriting: Rewriting) -> Graph:
    """Insert offloads, reloads and recomputed operations; the contents that readers see are unchanged.

    Values keep their numbers; new values get higher numbers. A recompute for several readers precedes the
    first of them.

    Raises:
        PlanError: an impossible decision, or a graph that is already rewritten.
    """
    if graph.role.any() or (graph.content != np.arange(len(graph.size))).any():
        raise PlanError("a graph that has been rewritten is not rewritten again")
    writer = _Writer(graph, Runs(graph, rewriting), rewriting)
    return writer.written() if writer.rows else graph


@dataclass
class _Row:
    """Inserted operation: ``like`` is the operation whose columns are copied, -1 for none."""

    like: int
    role: Role
    name: str
    reads: list[int]
    backward: bool


@dataclass
class _Reloading:
    """Reload whose readers are being redirected, with the reloaded number of each view so far."""

    reload: Reload
    name: str
    views: dict[int, int] = field(default_factory=dict)


class _Writer:
    def __init__(self, graph: Graph, runs: Runs, rewriting: Rewriting) -> None:
        self.graph, self.runs = graph, runs
        self.rows: list[_Row] = []  # row N + i of the table
        self.values: list[tuple[int, int, bool]] = []  # content, row, host
        self.offloads_after: dict[
            int, list[int]
        ] = {}  # rows by the row that they follow directly, -1 before all
        self.reloads_after: dict[int, list[int]] = {}
        self.reloads_before: dict[int, list[int]] = {}  # reloads by the row that they directly precede
        self.recomputed_before: dict[int, list[int]] = {}  # recomputed rows by the row that they serve
        self.views_before: dict[int, list[int]] = {}  # views of reloaded values by the row that they serve
        self.releases: list[tuple[int, int]] = []
        self.control: list[tuple[int, int]] = []
        self.reloads: dict[tuple[int, int], _Reloading] = {}
        self.reads = graph.reads.copy()
        self.copies: dict[int, int] = {}  # numbers of recomputed values by original value
        self.row_of: dict[int, int] = {}  # rows of recomputed operations by run
        self.outputs: dict[int, list[int]] = {}
        for value in np.flatnonzero(graph.producer >= 0).tolist():
            self.outputs.setdefault(int(graph.producer[value]), []).append(value)
        self._recompute()
        self._offload(rewriting)
        self._redirect()

    def _row(self, run: int) -> int:
        return self.row_of.get(run, run)

    def _put(self, row: _Row, outputs: list[int], *, host: bool = False) -> tuple[int, list[int]]:
        number, first = len(self.graph) + len(self.rows), len(self.graph.size) + len(self.values)
        self.rows.append(row)
        self.values += [(value, number, host) for value in outputs]
        return number, list(range(first, first + len(outputs)))

    def _recompute(self) -> None:
        g, n = self.graph, len(self.graph)
        for operation in sorted(self.runs.before):
            like = _Row(operation, Role.RECOMPUTED, f"recompute.{g.names[operation]}", [], backward=True)
            outputs = self.outputs[operation]
            row, made = self._put(like, outputs)
            self.row_of[n + operation] = row
            self.copies.update(zip(outputs, made, strict=True))
            self.recomputed_before.setdefault(self.runs.before[operation], []).append(row)

    def _offload(self, rewriting: Rewriting) -> None:
        g, n = self.graph, len(self.graph)
        hosts, offloads = list[int](), sorted(rewriting.offloads, key=self._leaves)
        for offload in offloads:
            run = offload.after if offload.after >= 0 else int(g.producer[offload.value])
            backward = run >= 0 and (run >= n or bool(g.backward[run]))
            like = int(g.producer[offload.value])
            out = _Row(like, Role.OFFLOAD, f"offload.{offload.value}", [offload.value], backward)
            row, (host,) = self._put(out, [offload.value], host=True)
            self.offloads_after.setdefault(self._row(run), []).append(row)
            hosts.append(host)
            if offload.release >= 0:
                self.releases.append((row, self._row(offload.release)))
        reloads = [
            (offload, i, host)
            for offload, host in zip(offloads, hosts, strict=True)
            for i in range(len(offload.reloads))
        ]
        for offload, number, host in sorted(reloads, key=lambda row: self._first(row[0].reloads[row[1]])):
            self.reloads[offload.value, number] = self._reload(offload, number, host)

    def _leaves(self, offload: Offload) -> tuple[int, bool, int]:
        return self.runs.place(offload.release) if offload.release >= 0 else (len(self.graph), True, 0)

    def _first(self, reload: Reload) -> tuple[int, bool, int]:
        return min(map(self.runs.place, reload.consumers))

    def _reload(self, offload: Offload, number: int, host: int) -> _Reloading:
        reload = offload.reloads[number]
        first = min(reload.consumers, key=self.runs.place)
        operation, name = self.runs.operation(first), f"reload.{offload.value}.{number}"
        backward = first >= len(self.graph) or bool(self.graph.backward[first])
        row, (value,) = self._put(_Row(operation, Role.RELOAD, name, [host], backward), [offload.value])
        if reload.trigger >= 0:
            self.reloads_after.setdefault(self._row(reload.trigger), []).append(row)
            self.control.append((self._row(reload.trigger), row))
        else:
            self.reloads_before.setdefault(self._row(first), []).append(row)
        return _Reloading(reload, name, {offload.value: value})

    def _redirect(self) -> None:
        """Replace the inputs of the affected runs in order; views are inserted before their first reader."""
        g, n = self.graph, len(self.graph)
        touched = set(self.runs.reload_numbers) | {n + op for op in self.runs.before}
        for value in self.runs.recomputed:
            touched |= {op for op in g.readers_of(value).tolist() if g.backward[op]}
        for run in sorted(touched, key=self.runs.place):
            operation = self.runs.operation(run)
            reads = [self._read(run, value) for value in g.read_by(operation).tolist()]
            if run >= n:
                self.rows[self._row(run) - n].reads = reads
            else:
                self.reads[g.reads_start[run] : g.reads_start[run + 1]] = reads

    def _read(self, run: int, value: int) -> int:
        served = self.runs.reload_of(run, int(self.graph.base[value]))
        if served is not None:
            return self._view(self.reloads[served], run, value)
        return self.copies[value] if self.runs.reads_recomputed(run, value) else value

    def _view(self, reload: _Reloading, run: int, value: int) -> int:
        """Return a value in the reloaded memory; insert a missing view before the run."""
        g, operation = self.graph, int(self.graph.producer[value])
        if value in reload.views:
            return reload.views[value]
        if operation in reload.reload.consumers:  # made from the reloaded value anyway
            return value
        if not g.repeatable[operation]:
            raise PlanError(f"{g.names[operation]} cannot run again: it would give something else")
        reads, base = g.read_by(operation).tolist(), g.base[value]
        if not (g.base[reads] == base).any():
            raise PlanError(f"{g.names[operation]} makes a view of what it does not read")
        reads = [self._view(reload, run, a) if g.base[a] == base else a for a in reads]
        name = f"{reload.name}.{g.names[operation]}"
        backward = run >= len(g) or bool(g.backward[run])
        row, made = self._put(
            _Row(operation, Role.RECOMPUTED, name, reads, backward), self.outputs[operation]
        )
        self.views_before.setdefault(self._row(run), []).append(row)
        reload.views.update(zip(self.outputs[operation], made, strict=True))
        return reload.views[value]

    def _order(self) -> NDArray[np.int64]:
        order = list[int]()

        def emit(row: int) -> None:
            for other in self.recomputed_before.get(row, ()):
                emit(other)
            order.extend(self.reloads_before.get(row, ()))
            order.extend(self.views_before.get(row, ()))
            order.append(row)
            order.extend(self.offloads_after.get(row, ()))
            order.extend(self.reloads_after.get(row, ()))

        order.extend(self.offloads_after.get(-1, ()))
        for row in range(len(self.graph)):
            emit(row)
        return np.array(order)

    def _released(self, order: NDArray[np.int64], position: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return control edges of a release: to the named run, and to the first row inserted before it."""
        n, waits = len(self.graph), list[tuple[int, int]]()
        for out, run in self.releases:
            first = int(position[run])
            while order[first - 1] >= n and self.rows[order[first - 1] - n].role != Role.OFFLOAD:
                first -= 1
            waits += [(out, row) for row in sorted({run, int(order[first])})]
        return waits

    def written(self) -> Graph:
        """Return the graph in the new order."""
        g, order = self.graph, self._order()
        position = np.argsort(order)
        kinds = g.kinds + (COPY_OPERATORS if self.offloads_after else ())
        lengths = np.concatenate([np.diff(g.reads_start), [len(row.reads) for row in self.rows]])
        reads = np.concatenate([self.reads, np.array([v for row in self.rows for v in row.reads], np.int64)])
        starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
        start = np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int64)
        picked = np.repeat(starts[order] - start[:-1], lengths[order]) + np.arange(start[-1])
        values = self._values(position)
        control = [*g.control.tolist(), *self.control, *self._released(order, position)]
        names = [*g.names, *(row.name for row in self.rows)]
        return g.with_columns(
            **{name: column[order] for name, column in self._operations(len(g.kinds)).items()},
            **values,
            reads_start=start,
            reads=reads[picked],
            control=position[np.array(control, np.int64).reshape(-1, 2)],
            names=tuple(names[row] for row in order.tolist()),
            kinds=kinds,
        )

    def _operations(self, kinds: int) -> dict[str, NDArray[Any]]:
        """Return the columns of the operations, inserted ones last."""
        g = self.graph
        like = np.array([row.like for row in self.rows])
        role = np.array([row.role for row in self.rows])
        recomputed = role == Role.RECOMPUTED
        new = {
            "seconds": np.where(recomputed, g.seconds[like], 0.0),
            "workspace": np.where(recomputed, g.workspace[like], 0),
            "backward": np.array([row.backward for row in self.rows]),
            "repeatable": recomputed,
            "role": role,
            "kind": np.where(recomputed, g.kind[like], kinds + (role == Role.RELOAD)),
            "module": np.where(like < 0, -1, g.module[like]),
        }
        return {name: np.concatenate([getattr(g, name), column]) for name, column in new.items()}

    def _values(self, position: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        """Return the columns of the values, inserted ones last."""
        g = self.graph
        content, row, host = (np.array(column) for column in zip(*self.values, strict=True))
        rows = np.concatenate([g.producer, row])
        new = {name: getattr(g, name)[content] for name in ("size", "rank")}
        no = np.zeros(len(content), bool)
        new |= {"lasting": no, "movable": no, "host": host, "content": content}
        columns = {name: np.concatenate([getattr(g, name), column]) for name, column in new.items()}
        columns["producer"] = np.where(rows < 0, -1, position[rows])
        columns["base"] = self._bases(columns["content"], rows, columns["producer"])
        return columns

    def _bases(
        self, content: NDArray[np.int64], rows: NDArray[np.int64], producer: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the base of each value: a view has the memory that its operation now reads."""
        g, m = self.graph, len(self.graph.size)
        base, of = np.arange(len(content)), g.base[content]
        base[:m] = g.base
        touched = np.isin(of, of[m:]) & (of != content) & (rows >= 0)
        views = np.flatnonzero(touched)
        for view in views[np.argsort(producer[views], kind="stable")].tolist():
            row = int(rows[view])
            reads = self._reads_of(row)
            same = reads[of[reads] == of[view]]
            if len(same):
                base[view] = base[same[0]]
            elif view >= m:
                raise PlanError(f"{self.rows[row - len(g)].name} makes a view of what it does not read")
        return base

    def _reads_of(self, row: int) -> NDArray[np.int64]:
        g, n = self.graph, len(self.graph)
        if row >= n:
            return np.array(self.rows[row - n].reads)
        return self.reads[g.reads_start[row] : g.reads_start[row + 1]]

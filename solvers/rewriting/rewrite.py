"""Application of decisions to a graph, and the inverse."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from solvers.errors import PlanError
from solvers.rewriting.graph import Graph, Role
from solvers.rewriting.rewriting import Rewriting, Sync
from solvers.rewriting.runs import Runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.rewriting.rewriting import Swap, SwapIn

COPY_OPERATORS = ("mempool.offload", "mempool.reload")


def rewrite(graph: Graph, rewriting: Rewriting) -> Graph:
    """Insert offloads, reloads and recomputed operations: every reader sees the same contents as before.

    Values keep their numbers; new values follow behind them. A recompute for several readers stands before
    the first of them.

    Raises:
        PlanError: an impossible decision, or a graph that is already rewritten.
    """
    if graph.role.any() or (graph.content != np.arange(len(graph.size))).any():
        raise PlanError("a graph that has been rewritten is not rewritten again")
    writer = _Writer(graph, Runs(graph, rewriting), rewriting)
    return writer.written() if writer.rows else graph


def erase(graph: Graph) -> Graph:
    """Remove offloads, reloads and recomputed operations: the inverse of `rewrite`."""
    keep = graph.role == Role.ORIGINAL
    if keep.all():
        return graph
    number = np.cumsum(keep) - 1
    there = (graph.producer < 0) | keep[graph.producer]
    moved = np.isin(graph.role, (Role.SWAP_OUT, Role.SWAP_IN)).any()
    counts = np.diff(graph.reads_start)
    operations = ("seconds", "workspace", "backward", "repeatable", "role", "kind", "module")
    values = ("size", "rank", "lasting", "movable", "host")
    producer = graph.producer[there]
    control = graph.control[keep[graph.control].all(axis=1)]
    return graph.with_columns(
        **{name: getattr(graph, name)[keep] for name in operations},
        **{name: getattr(graph, name)[there] for name in values},
        producer=np.where(producer < 0, -1, number[producer]),
        base=graph.content[graph.base[there]],
        content=graph.content[there],
        reads_start=np.concatenate([[0], np.cumsum(counts[keep])]),
        reads=graph.content[graph.reads[keep[graph.reader]]],
        control=number[control],
        names=tuple(name for name, kept in zip(graph.names, keep.tolist(), strict=True) if kept),
        kinds=graph.kinds[: -len(COPY_OPERATORS)] if moved else graph.kinds,
    )


@dataclass
class _Row:
    """Inserted operation: ``like`` is the operation whose columns are copied, -1 for none."""

    like: int
    role: Role
    name: str
    reads: list[int]
    backward: bool


@dataclass
class _Back:
    """Reload whose readers are being redirected, with the reloaded number of each view so far."""

    swap: Swap
    back: SwapIn
    name: str
    views: dict[int, int] = field(default_factory=dict)


class _Writer:
    def __init__(self, graph: Graph, runs: Runs, rewriting: Rewriting) -> None:
        self.graph, self.runs, self.sync = graph, runs, rewriting.sync
        self.rows: list[_Row] = []  # row N + i of the table
        self.values: list[tuple[int, int, bool]] = []  # content, row, host
        self.outs: dict[int, list[int]] = {}  # rows by the row that they follow directly, -1 before all
        self.ins: dict[int, list[int]] = {}
        self.just: dict[int, list[int]] = {}  # swap-ins by the row that they directly precede
        self.before: dict[int, list[int]] = {}  # recomputed rows by the row that they serve
        self.views: dict[int, list[int]] = {}  # views of reloaded values by the row that they serve
        self.releases: list[tuple[int, int]] = []
        self.control: list[tuple[int, int]] = []
        self.backs: dict[tuple[int, int], _Back] = {}
        self.reads = graph.reads.copy()
        self.copies: dict[int, int] = {}  # numbers of recomputed values by original value
        self.row_of: dict[int, int] = {}  # rows of recomputed operations by run
        self.outputs: dict[int, list[int]] = {}
        for value in np.flatnonzero(graph.producer >= 0).tolist():
            self.outputs.setdefault(int(graph.producer[value]), []).append(value)
        self._retrace()
        self._swaps(rewriting)
        self._redirect()

    def _row(self, run: int) -> int:
        return self.row_of.get(run, run)

    def _put(self, row: _Row, outputs: list[int], *, host: bool = False) -> tuple[int, list[int]]:
        number, first = len(self.graph) + len(self.rows), len(self.graph.size) + len(self.values)
        self.rows.append(row)
        self.values += [(value, number, host) for value in outputs]
        return number, list(range(first, first + len(outputs)))

    def _retrace(self) -> None:
        g, n = self.graph, len(self.graph)
        for operation in sorted(self.runs.before):
            like = _Row(operation, Role.RECOMPUTED, f"again.{g.names[operation]}", [], backward=True)
            outputs = self.outputs[operation]
            row, made = self._put(like, outputs)
            self.row_of[n + operation] = row
            self.copies.update(zip(outputs, made, strict=True))
            self.before.setdefault(self.runs.before[operation], []).append(row)

    def _swaps(self, rewriting: Rewriting) -> None:
        g, n = self.graph, len(self.graph)
        hosts, swaps = list[int](), sorted(rewriting.swaps, key=self._leaves)
        for swap in swaps:
            run = swap.after if swap.after >= 0 else int(g.producer[swap.value])
            backward = run >= 0 and (run >= n or bool(g.backward[run]))
            like = int(g.producer[swap.value])
            out = _Row(like, Role.SWAP_OUT, f"out.{swap.value}", [swap.value], backward)
            row, (host,) = self._put(out, [swap.value], host=True)
            self.outs.setdefault(self._row(run), []).append(row)
            hosts.append(host)
            if swap.release >= 0:
                self.releases.append((row, self._row(swap.release)))
        backs = [
            (swap, i, host) for swap, host in zip(swaps, hosts, strict=True) for i in range(len(swap.ins))
        ]
        for swap, number, host in sorted(backs, key=lambda back: self._first(back[0].ins[back[1]])):
            self.backs[swap.value, number] = self._back(swap, number, host)

    def _leaves(self, swap: Swap) -> tuple[int, bool, int]:
        return self.runs.place(swap.release) if swap.release >= 0 else (len(self.graph), True, 0)

    def _first(self, back: SwapIn) -> tuple[int, bool, int]:
        return min(map(self.runs.place, back.consumers))

    def _back(self, swap: Swap, number: int, host: int) -> _Back:
        back = swap.ins[number]
        first = min(back.consumers, key=self.runs.place)
        operation, name = self.runs.operation(first), f"in.{swap.value}.{number}"
        backward = first >= len(self.graph) or bool(self.graph.backward[first])
        row, (value,) = self._put(_Row(operation, Role.SWAP_IN, name, [host], backward), [swap.value])
        trigger = back.trigger
        if self.sync & Sync.IN:
            self.control += [(other, row) for other in self._others(first)]
            trigger = -1
        if trigger >= 0:
            self.ins.setdefault(self._row(trigger), []).append(row)
        else:
            self.just.setdefault(self._row(first), []).append(row)
        if back.trigger >= 0:
            self.control.append((self._row(back.trigger), row))
        return _Back(swap, back, name, {swap.value: value})

    def _others(self, run: int) -> list[int]:
        """Return the producers of all other inputs that a run reads unchanged."""
        g, served = self.graph, self.runs.served.get(run, {})
        reads = g.read_by(self.runs.operation(run)).tolist()
        plain = [a for a in reads if g.base[a] not in served and not self.runs.again_for(run, a)]
        return sorted({int(g.producer[a]) for a in plain if g.producer[a] >= 0})

    def _redirect(self) -> None:
        """Replace the inputs of the affected runs in order; views are inserted before their first reader."""
        g, n = self.graph, len(self.graph)
        touched = set(self.runs.served) | {n + op for op in self.runs.before}
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
        served = self.runs.copy_of(run, int(self.graph.base[value]))
        if served is not None:
            return self._view(self.backs[served], run, value)
        return self.copies[value] if self.runs.again_for(run, value) else value

    def _view(self, back: _Back, run: int, value: int) -> int:
        """Return a value in the reloaded memory; insert a missing view in front of the run."""
        g, operation = self.graph, int(self.graph.producer[value])
        if value in back.views:
            return back.views[value]
        if operation in back.back.consumers:  # produced from the reloaded value without changes
            return value
        if not g.repeatable[operation]:
            raise PlanError(f"{g.names[operation]} cannot run again: it would give something else")
        reads, base = g.read_by(operation).tolist(), g.base[value]
        if not (g.base[reads] == base).any():
            raise PlanError(f"{g.names[operation]} makes a view of what it does not read")
        reads = [self._view(back, run, a) if g.base[a] == base else a for a in reads]
        name = f"{back.name}.{g.names[operation]}"
        backward = run >= len(g) or bool(g.backward[run])
        row, made = self._put(
            _Row(operation, Role.RECOMPUTED, name, reads, backward), self.outputs[operation]
        )
        self.views.setdefault(self._row(run), []).append(row)
        back.views.update(zip(self.outputs[operation], made, strict=True))
        return back.views[value]

    def _order(self) -> NDArray[np.int64]:
        order = list[int]()

        def emit(row: int) -> None:
            for other in self.before.get(row, ()):
                emit(other)
            order.extend(self.just.get(row, ()))
            order.extend(self.views.get(row, ()))
            order.append(row)
            order.extend(self.outs.get(row, ()))
            order.extend(self.ins.get(row, ()))

        order.extend(self.outs.get(-1, ()))
        for row in range(len(self.graph)):
            emit(row)
        return np.array(order)

    def _released(self, order: NDArray[np.int64], position: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return control edges for releases: to the named run, and to the first row inserted before."""
        n, waits = len(self.graph), list[tuple[int, int]]()
        for out, run in self.releases:
            first = int(position[run])
            while order[first - 1] >= n and self.rows[order[first - 1] - n].role != Role.SWAP_OUT:
                first -= 1
            waits += [(out, row) for row in sorted({run, int(order[first])})]
        return waits

    def _who_waits(
        self, position: NDArray[np.int64], reader: NDArray[np.int64], memory: NDArray[np.int64]
    ) -> list[tuple[int, int]]:
        """Return pairs of a copy out and a later reader of the same memory, also inserted ones."""
        out_of = np.full(len(self.graph.size) + len(self.values), -1)
        for out in (row for rows in self.outs.values() for row in rows):
            out_of[self.rows[out - len(self.graph)].reads] = out
        outs = out_of[memory]
        late = (outs >= 0) & (position[reader] > position[outs])
        return sorted(set(zip(outs[late].tolist(), reader[late].tolist(), strict=True)))

    def written(self) -> Graph:
        """Return the graph in the new order."""
        g, order = self.graph, self._order()
        position = np.argsort(order)
        kinds = g.kinds + (COPY_OPERATORS if self.outs else ())
        lengths = np.concatenate([np.diff(g.reads_start), [len(row.reads) for row in self.rows]])
        reads = np.concatenate([self.reads, np.array([v for row in self.rows for v in row.reads], np.int64)])
        starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
        start = np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int64)
        picked = np.repeat(starts[order] - start[:-1], lengths[order]) + np.arange(start[-1])
        values = self._values(position)
        control = [*g.control.tolist(), *self.control, *self._released(order, position)]
        if self.sync & Sync.OUT:
            reader = np.repeat(np.arange(len(lengths)), lengths)
            control += self._who_waits(position, reader, values["base"][reads])
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
        again = role == Role.RECOMPUTED
        new = {
            "seconds": np.where(again, g.seconds[like], 0.0),
            "workspace": np.where(again, g.workspace[like], 0),
            "backward": np.array([row.backward for row in self.rows]),
            "repeatable": again,
            "role": role,
            "kind": np.where(again, g.kind[like], kinds + (role == Role.SWAP_IN)),
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
        """Return the base of each value: a view shares the memory that the view's operation reads now."""
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

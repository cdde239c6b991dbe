"""Runs of a rewritten graph: the recomputed operations, and the reload that each run reads."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from solvers.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.rewriting.graph import Graph
    from solvers.rewriting.records import Offload, Rewriting


class Runs:
    """Runs of a rewritten graph: run i is operation i, run N + i is the recompute of operation i.

    Attributes:
        reload_numbers: for each run, the number of the reload that the run reads, by base.
        recomputed: the recomputed values, including forward views of the requested ones and all other outputs
            of the same operations.
        before: for each recomputed operation, the operation that directly follows the recompute.

    Raises:
        PlanError: an impossible decision, with the reason.
    """

    def __init__(self, graph: Graph, rewriting: Rewriting) -> None:
        self.graph = graph
        self.reload_numbers: dict[int, dict[int, int]] = {}
        self.recomputed = self._with_views(rewriting.recomputed)
        for offload in rewriting.offloads:
            self._serve(offload)
        self.before = self._needed()
        self._check(rewriting)

    def operation(self, run: int) -> int:
        """Return the operation of a run."""
        return run % len(self.graph)

    def place(self, run: int) -> tuple[int, bool, int]:
        """Return a key that sorts runs in execution order."""
        n = len(self.graph)
        if 0 <= run < n:
            return run, True, run
        if run - n not in self.before:
            raise PlanError(f"a decision names run {run}, which there is not")
        return self.before[run - n], False, run - n

    @cached_property
    def _by_base(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        order = np.argsort(self.graph.base, kind="stable")
        return order, np.searchsorted(self.graph.base[order], np.arange(len(order) + 1))

    def sharing(self, base: int) -> NDArray[np.int64]:
        """Return the values that share a memory: the base and all views."""
        order, start = self._by_base
        return order[start[base] : start[base + 1]]

    def reload_of(self, run: int, base: int) -> tuple[int, int] | None:
        """Return the reload of a memory that a run reads: (value, number of the reload)."""
        number = self.reload_numbers.get(run, {}).get(base)
        return None if number is None else (base, number)

    def reads_recomputed(self, run: int, value: int) -> bool:
        """Return true if a run reads the recomputed copy of a value."""
        n = len(self.graph)
        return value in self.recomputed and (run >= n or bool(self.graph.backward[run]))

    def _with_views(self, values: tuple[int, ...]) -> frozenset[int]:
        g = self.graph
        for value in values:
            if not 0 <= value < len(g.size):
                raise PlanError(f"there is no value {value} to recompute")
            if g.producer[value] < 0:
                raise PlanError(f"value {value} is an input: nothing makes it again")
            if g.backward[g.producer[value]]:
                raise PlanError(f"value {value} is made in the backward pass: there is nothing to recompute")
        if not values:
            return frozenset()
        forward = (g.producer >= 0) & ~g.backward[g.producer]
        wanted = np.isin(g.base, values) & forward
        wanted[list(values)] = True
        beside = np.isin(g.producer, g.producer[wanted]) & forward  # a recompute yields all outputs
        return frozenset(np.flatnonzero(beside).tolist())

    def _serve(self, offload: Offload) -> None:
        for number, reload in enumerate(offload.reloads):
            for run in reload.consumers:
                mine = self.reload_numbers.setdefault(run, {})
                if offload.value in mine:
                    raise PlanError(f"run {run} reads value {offload.value} from two copies")
                mine[offload.value] = number

    def _needed(self) -> dict[int, int]:
        g, n, before = self.graph, len(self.graph), dict[int, int]()
        made = sorted(self.recomputed, key=lambda value: (-g.producer[value], value))
        for value in made:
            operation, base = int(g.producer[value]), int(g.base[value])
            for reader in g.readers_of(value).tolist():
                if g.backward[reader] and base not in self.reload_numbers.get(reader, {}):
                    before[operation] = min(before.get(operation, n), reader)
                if reader in before and base not in self.reload_numbers.get(n + reader, {}):
                    before[operation] = min(before.get(operation, n), before[reader])
        return before

    def _check(self, rewriting: Rewriting) -> None:
        g = self.graph
        behind = dict[int, int]()
        for earlier, later in g.control.tolist():
            behind[earlier] = min(behind.get(earlier, len(g)), later)
        for operation, place in self.before.items():
            name = g.names[operation]
            if not g.repeatable[operation]:
                raise PlanError(f"{name} cannot run again: it would give something else")
            if behind.get(operation, len(g)) < place:
                raise PlanError(f"{name} must run before {g.names[behind[operation]]}, so not again after it")
        values = [offload.value for offload in rewriting.offloads]
        if len(set(values)) != len(values):
            raise PlanError("a value is offloaded twice")
        for offload in rewriting.offloads:
            self._check_offload(offload)

    def _check_offload(self, offload: Offload) -> None:
        g, value = self.graph, offload.value
        if not 0 <= value < len(g.size):
            raise PlanError(f"there is no value {value} to offload")
        reasons = [
            (g.base[value] != value, "a view: its base is offloaded"),
            (bool(g.host[value]), "in the host's memory already"),
            (not g.movable[value], "not to be moved"),
            (bool(g.lasting[self.sharing(value)].any()), "there after the step"),
            (value in self.recomputed, "recomputed"),
        ]
        for wrong, what in reasons:
            if wrong:
                raise PlanError(f"value {value} cannot be offloaded: it is {what}")
        out = self.out_place(offload)
        if out < self.out_place(replace(offload, after=-1)):
            raise PlanError(f"value {value} leaves before it is made")
        if offload.release >= 0 and self.place(offload.release) <= out:
            raise PlanError(f"value {value} is given back before it leaves")
        for reload in offload.reloads:
            self._check_reload(offload, reload.consumers, reload.trigger)

    def _check_reload(self, offload: Offload, consumers: tuple[int, ...], trigger: int) -> None:
        g = self.graph
        if not consumers:
            raise PlanError(f"a copy back of value {offload.value} that nobody reads")
        for run in consumers:
            self.place(run)
            if not (g.base[g.read_by(self.operation(run))] == offload.value).any():
                raise PlanError(f"run {run} does not read value {offload.value}")
        first = min(map(self.place, consumers))
        start = self.out_place(offload) if trigger < 0 else self.place(trigger)
        if not self.out_place(offload) <= start < first:
            raise PlanError(f"value {offload.value} returns before it has left or after it is read")

    def out_place(self, offload: Offload) -> tuple[int, bool, int]:
        """Return the place of the run after which the offload of a value starts; inputs: before all runs."""
        run = offload.after if offload.after >= 0 else int(self.graph.producer[offload.value])
        return (-1, True, -1) if run < 0 else self.place(run)

"""The published simulator again, slow and plain: memories, and who still reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from solvers.rewriting import Role, Sync, rewrite

if TYPE_CHECKING:
    from solvers.rewriting import Graph, Rewriting, Swap, SwapIn
    from solvers.rewriting.levels import Levels


def reaches(graph: Graph, later: int) -> set[int]:
    """The operations from which there is a path to one, itself among them."""
    found = {later}
    for op in range(later, -1, -1):
        if op in found:
            found |= {int(p) for p in graph.producer[graph.read_by(op)] if p >= 0}
            found |= {int(a) for a, b in graph.control if b == op}
    return found


def slow_play(graph: Graph, levels: Levels, rewriting: Rewriting) -> int:
    """The most bytes on the device."""
    new = rewrite(graph, rewriting)
    order = sorted(range(len(graph)), key=lambda op: (levels.level[op], op))
    name = {name: op for op, name in enumerate(graph.names)}
    waiting = _readers(new, name)
    due = _due(graph, levels, rewriting, order)
    lasts = set(graph.base[graph.lasting].tolist())
    swapped = {swap.value for swap in rewriting.swaps}
    copies = {new.names[int(new.producer[v])]: v for v in range(len(new.size)) if new.producer[v] >= 0}
    here: dict[int, int] = {}
    leaving: list[int] = []
    peak = 0

    def note(values: list[int]) -> int:
        here.update((v, int(new.size[v])) for v in values)
        return sum(here.values())

    def forget(value: int) -> None:
        if value in here and not waiting[value] and value not in lasts:
            if value in swapped:
                leaving.append(value)
            else:
                del here[value]

    inputs = [v for v, p in enumerate(graph.producer.tolist()) if p < 0 and graph.base[v] == v]
    peak = note([v for v in inputs if v not in lasts and not graph.host[v]])
    for value in inputs:
        forget(value)
    for op in order:
        gone = leaving[:]
        made = [v for v in np.flatnonzero(graph.producer == op).tolist() if graph.base[v] == v]
        peak = max(peak, note([v for v in made if not graph.host[v]]))
        leaving.clear()
        for value in gone:
            del here[value]
        for value in list(here):
            was = op in waiting[value]
            waiting[value].discard(op)
            if was or value in made:
                forget(value)
        peak = max(peak, note([copies[copy] for copy in due.get(op, ())]))
    return peak


def _readers(new: Graph, name: dict[str, int]) -> dict[int, set[int]]:
    waiting: dict[int, set[int]] = {v: set() for v in range(len(new.size))}
    for row in np.flatnonzero(new.role == Role.ORIGINAL).tolist():
        for value in new.read_by(row).tolist():
            waiting[int(new.base[value])].add(name[new.names[row]])
    return waiting


def _due(graph: Graph, levels: Levels, rewriting: Rewriting, order: list[int]) -> dict[int, list[str]]:
    """The copies that come after each operation."""
    place = {op: i for i, op in enumerate(order)}
    due: dict[int, list[str]] = {}
    for swap in rewriting.swaps:
        for i, back in enumerate(swap.ins):
            at = max(_start(graph, place, swap, back, rewriting.sync), place[int(graph.producer[swap.value])])
            due.setdefault(order[at], []).append(f"in.{swap.value}.{i}")
    return due


def _start(graph: Graph, place: dict[int, int], swap: Swap, back: SwapIn, sync: Sync) -> int:
    first = min(back.consumers, key=lambda op: place[op])
    makers = [int(graph.producer[v]) for v in graph.read_by(first) if graph.base[v] != swap.value]
    others = max((place[op] for op in makers if op >= 0), default=place[first] - 1)
    if back.trigger < 0:
        return others
    return max(place[back.trigger], others) if sync & Sync.IN else place[back.trigger]

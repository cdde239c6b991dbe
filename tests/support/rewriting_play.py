"""Slow model of the published simulator, which counts the readers of each memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from solvers.rewriting import Role, apply_rewriting

if TYPE_CHECKING:
    from solvers.rewriting import Graph, Offload, Reload, Rewriting
    from solvers.rewriting.distance_rule import Levels


def slow_play(graph: Graph, levels: Levels, rewriting: Rewriting) -> int:
    """Return the most bytes on the device."""
    new = apply_rewriting(graph, rewriting)
    order = sorted(range(len(graph)), key=lambda op: (levels.level[op], op))
    name = {name: op for op, name in enumerate(graph.names)}
    waiting = _readers(new, name)
    due = _due(graph, levels, rewriting, order)
    lasts = set(graph.base[graph.lasting].tolist())
    swapped = {offload.value for offload in rewriting.offloads}
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
    """Return the reloads that begin after each operation."""
    place = {op: i for i, op in enumerate(order)}
    due: dict[int, list[str]] = {}
    for offload in rewriting.offloads:
        for i, reload in enumerate(offload.reloads):
            at = max(_start(graph, place, offload, reload), place[int(graph.producer[offload.value])])
            due.setdefault(order[at], []).append(f"reload.{offload.value}.{i}")
    return due


def _start(graph: Graph, place: dict[int, int], offload: Offload, reload: Reload) -> int:
    first = min(reload.consumers, key=lambda op: place[op])
    makers = [int(graph.producer[v]) for v in graph.read_by(first) if graph.base[v] != offload.value]
    others = max((place[op] for op in makers if op >= 0), default=place[first] - 1)
    return others if reload.trigger < 0 else place[reload.trigger]

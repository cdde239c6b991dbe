"""Graphs refuse contradictory columns, and know the readers of each value."""

from __future__ import annotations

import numpy as np
import pytest
from rewriting_graphs import chain

from solvers.errors import PlanError


def test_readers_are_the_reads_turned_round() -> None:
    graph = chain(5)
    pairs = {(int(v), int(op)) for op in range(len(graph)) for v in graph.read_by(op)}
    assert pairs == {(v, int(op)) for v in range(len(graph.size)) for op in graph.readers_of(v)}


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"seconds": [0.0]}, "lengths"),
        ({"seconds": [np.nan] * 8}, "times"),
        ({"size": [-1] * 9}, "negative"),
        ({"reads": [9] * 11}, "does not have"),
        ({"producer": [8] * 9}, "no operation"),
        ({"reads_start": [1] * 9}, "divided"),
        ({"control": [[3, 2]]}, "control"),
        ({"control": [[3, 9]]}, "order of no"),
        ({"names": ("a",) * 8}, "two operations"),
        ({"base": [1, 2, 2, 3, 4, 5, 6, 7, 8]}, "view of a view"),
        ({"content": [1, 2, 2, 3, 4, 5, 6, 7, 8]}, "copy of a copy"),
    ],
)
def test_contradictory_columns_are_refused(columns: dict[str, object], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        chain(4).with_columns(**columns)


def test_value_read_before_its_producer_is_refused() -> None:
    graph = chain(4)
    late = graph.producer.copy()
    late[1] = 7
    with pytest.raises(PlanError, match="before it is made"):
        graph.with_columns(producer=late)


def test_two_graphs_are_the_same_only_in_every_column() -> None:
    graph = chain(4)
    assert graph.same_as(chain(4))
    assert not graph.same_as(graph.with_columns(size=graph.size + 1))
    assert not graph.same_as(graph.with_columns(kinds=("other",)))

"""Random programs of array operations, and a slow model of what they read and write."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st

Step = tuple[Any, ...]
BINARY = ("add", "subtract", "multiply", "maximum")
IN_PLACE: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.iadd,
    "subtract": operator.isub,
    "multiply": operator.imul,
}
UNARY: dict[str, Callable[[Any], Any]] = {"negative": operator.neg, "absolute": abs}
VIEWS: tuple[Callable[[Any], Any], ...] = (
    lambda a: a[1:],
    lambda a: a[::-1],
    lambda a: a.T,
    lambda a: a[..., None],
    lambda a: a.reshape(a.shape),
    np.atleast_2d,
    np.transpose,
    lambda a: a.view(a.dtype),
)
COPIES: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("copy", lambda a: a.copy()),
    ("copy", np.copy),
    ("__getitem__", lambda a: a[[0]]),
    ("astype", lambda a: a.astype(np.float64)),
    ("sort", np.sort),
    ("flatten", lambda a: a.flatten()),
    ("cumsum", lambda a: a.cumsum(axis=0)),
    ("concatenate", lambda a: np.concatenate([a, a])),
    ("add.accumulate", np.add.accumulate),
    ("where", lambda a: np.where(True, a, 0.0)),
)
REDUCTIONS: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("sum", lambda a: a.sum()),
    ("sum", np.sum),
    ("max", lambda a: a.max(initial=0)),
    ("add.reduce", lambda a: np.add.reduce(a, axis=None)),
    ("tolist", lambda a: a.tolist()),
    ("all", np.all),
)
WRITES: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("fill", "W", lambda a: a.fill(3)),
    ("__setitem__", "W", lambda a: a.__setitem__(slice(None), 2)),
    ("sort", "RW", lambda a: a.sort(axis=0)),
    ("copyto", "W", lambda a: np.copyto(a, 1.0)),
    ("put", "W", lambda a: np.put(a, [0], 4.0)),
)


def programs(variables: int = 4) -> st.SearchStrategy[list[Step]]:
    """Draw the steps of a program.

    Its variables are initially arrays of one to three rows and two columns.
    """
    variable = st.integers(0, variables - 1)
    kinds = (
        st.tuples(st.just("binary"), st.sampled_from(BINARY), variable, variable, variable),
        st.tuples(st.just("out"), st.sampled_from(BINARY), variable, variable, variable),
        st.tuples(st.just("in_place"), st.sampled_from(sorted(IN_PLACE)), variable, variable),
        st.tuples(st.just("unary"), st.sampled_from(sorted(UNARY)), variable, variable),
        st.tuples(st.just("view"), st.integers(0, len(VIEWS) - 1), variable, variable),
        st.tuples(st.just("copy"), st.integers(0, len(COPIES) - 1), variable, variable),
        st.tuples(st.just("reduce"), st.integers(0, len(REDUCTIONS) - 1), variable),
        st.tuples(st.just("write"), st.integers(0, len(WRITES) - 1), variable),
        st.tuples(st.just("set"), variable, variable),
        st.tuples(st.just("name"), variable, variable),
    )
    return st.lists(st.one_of(kinds), max_size=25)


def start(variables: int = 4) -> list[Any]:
    """Return the initial arrays of a program."""
    return [np.arange(2.0 * (1 + at % 3)).reshape(-1, 2) - at for at in range(variables)]


def run(program: list[Step], arrays: list[Any]) -> list[Any]:
    """Run the steps that NumPy allows; return the final arrays of the variables."""
    for step in program:
        try:
            do(step, arrays)
        except (ValueError, IndexError):
            continue
    return arrays


def do(step: Step, arrays: list[Any]) -> None:
    """Run one step."""
    kind, *given = step
    if kind == "binary":
        arrays[given[3]] = getattr(np, given[0])(arrays[given[1]], arrays[given[2]])
    elif kind == "out":
        getattr(np, given[0])(arrays[given[1]], arrays[given[2]], out=arrays[given[3]])
    elif kind == "in_place":
        arrays[given[1]] = IN_PLACE[given[0]](arrays[given[1]], arrays[given[2]])
    elif kind == "unary":
        arrays[given[2]] = UNARY[given[0]](arrays[given[1]])
    elif kind == "view":
        arrays[given[2]] = VIEWS[given[0]](arrays[given[1]])
    elif kind == "copy":
        arrays[given[2]] = COPIES[given[0]][1](arrays[given[1]])
    elif kind == "reduce":
        REDUCTIONS[given[0]][1](arrays[given[1]])
    elif kind == "write":
        WRITES[given[0]][2](arrays[given[1]])
    elif kind == "set":
        arrays[given[0]][...] = arrays[given[1]]
    else:
        arrays[given[1]] = arrays[given[0]]


class Model:
    """Model of a program's effects on buffers, derived from the names of its steps alone.

    Attributes:
        events: (kind, buffer, operation): A, F, R or W.
    """

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays  # plain ones, whose shapes decide what NumPy allows
        self.of = list(range(len(arrays)))  # buffer of each variable
        self.count = len(arrays)
        self.events = [("A", at, "") for at in self.of]

    def run(self, program: list[Step]) -> None:
        """Run the steps."""
        for step in program:
            before = list(self.arrays)
            try:
                do(step, self.arrays)
            except (ValueError, IndexError):
                assert all(one is other for one, other in zip(before, self.arrays, strict=True))
                self.refused(step)
                continue
            self.tell(step)

    def refused(self, step: Step) -> None:
        """Record accesses to the operands of a step that raises."""
        kind, *given = step
        if kind == "binary":
            self.touch(given[0], given[1:3], [])
        elif kind in ("out", "in_place", "set", "write"):
            self.tell(step)

    def tell(self, step: Step) -> None:
        """Record the events of a completed step."""
        kind, *given = step
        if kind == "binary":
            self.makes(given[0], given[1:3], given[3])
        elif kind == "out":
            self.touch(given[0], given[1:3], [given[3]])
        elif kind == "in_place":
            self.touch(given[0], given[1:3], [given[1]])
        elif kind == "unary":
            self.makes(given[0], [given[1]], given[2])
        elif kind == "copy":
            self.makes(COPIES[given[0]][0], [given[1]], given[2])
        elif kind == "reduce":
            self.touch(REDUCTIONS[given[0]][0], [given[1]], [])
        elif kind == "write":
            name, what, _ = WRITES[given[0]]
            self.touch(name, [given[1]] if "R" in what else [], [given[1]])
        elif kind == "set":
            self.touch("__setitem__", [given[1]], [given[0]])
        elif kind == "view":
            self.assign(given[2], self.of[given[1]])
        else:
            self.assign(given[1], self.of[given[0]])

    def makes(self, name: str, reads: list[int], to: int) -> None:
        """Record a new buffer computed from others, which replaces the buffer of a variable."""
        new, self.count = self.count, self.count + 1
        self.events.append(("A", new, name))
        self.touch(name, reads, [])
        self.events.append(("W", new, name))
        self.assign(to, new)

    def touch(self, name: str, reads: list[int], writes: list[int]) -> None:
        """Record reads and writes of buffers, each once."""
        self.events += [("R", buffer, name) for buffer in dict.fromkeys(self.of[one] for one in reads)]
        self.events += [("W", buffer, name) for buffer in dict.fromkeys(self.of[one] for one in writes)]

    def assign(self, variable: int, buffer: int) -> None:
        """Let a variable name another buffer, and free the buffer that loses its last name."""
        old, self.of[variable] = self.of[variable], buffer
        if old not in self.of:
            self.events.append(("F", old, ""))

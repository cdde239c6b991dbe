"""Contenders in separate processes that take turns, and the table of their results."""

from __future__ import annotations

import contextlib
import ctypes.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from mempool.demo.race import Process

WORKER = Path(__file__).parents[1] / "benchmarks" / "worker.py"
#: Settings with which glibc never returns memory to the system.
KEEPING = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
#: Name -> the shared library of Debian's package.
PEERS = {"jemalloc": "jemalloc", "tcmalloc": "tcmalloc_minimal", "mimalloc": "mimalloc"}

#: Largest number of turns to wait until all processes have settled; some programs never repeat.
MOST_WARM_UP = 30


@dataclass
class Contender:
    """A process, its allocator and its answers.

    Attributes:
        preload: file name of a library to preload, or "".
        variables: variables of its environment.
        turns: one dict for each timed turn, of lists with one value for each step.
        end: the answer to the last command.
    """

    name: str
    allocator: str = "default"
    preload: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    turns: list[dict[str, list[Any]]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)

    def median(self, key: str) -> float:
        """Return the median over all timed steps."""
        return median(value for turn in self.turns for value in turn[key])

    def rounds(self, key: str) -> list[float]:
        """Return the median of each round."""
        return [median(turn[key]) for turn in self.turns]


def preload(name: str) -> str | None:
    """Return the library of a peer, or None if not installed."""
    return ctypes.util.find_library(PEERS[name])


def ratio(one: Contender, other: Contender, key: str = "seconds") -> float:
    """Return the median over the rounds of the ratio of the times of `one` and `other`."""
    return median(a / b for a, b in zip(one.rounds(key), other.rounds(key), strict=True))


def race(contenders: Sequence[Contender], workload: str, *, steps: int, warm_up: int, rounds: int) -> None:
    """Run `rounds` timed turns of `steps` steps in each process, every second round in reverse order.

    At least `warm_up` untimed turns come first, until all processes have settled, so that steady states are
    compared.
    """
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                Process([str(WORKER), workload, one.allocator], LD_PRELOAD=one.preload, **one.variables)
            )
            for one in contenders
        ]
        order = list(zip(contenders, processes, strict=True))
        settled, turn = False, 0
        while turn < warm_up or (not settled and turn < MOST_WARM_UP):
            answers = [process.ask(f"steps {steps}") for process in processes]  # of each
            settled = all(answer["settled"] for answer in answers)
            turn += 1
        for turn in range(rounds):
            for one, process in reversed(order) if turn % 2 else order:
                one.turns.append(process.ask(f"timed {steps}"))
        for one, process in zip(contenders, processes, strict=True):
            one.end = process.ask("end")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table with aligned columns and floats of three digits."""
    cells = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    width = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]
    line = "| " + " | ".join(f"{{:<{w}}}" for w in width) + " |"
    rule = "|" + "|".join("-" * (w + 2) for w in width) + "|"
    return "\n".join(["", title, "", line.format(*columns), rule, *(line.format(*row) for row in cells), ""])

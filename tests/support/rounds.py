"""Contenders in processes of their own that take turns, and the table of what they did."""

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
#: glibc that never gives memory back, and so never has to take it again.
KEEPING = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
#: Name -> the shared library of Debian's package.
PEERS = {"jemalloc": "jemalloc", "tcmalloc": "tcmalloc_minimal", "mimalloc": "mimalloc"}

#: Turns after which those that are not settled, as a program that never repeats, are taken as they are.
MOST_WARM_UP = 30


@dataclass
class Contender:
    """One process: which allocator it has, and what it answered.

    Attributes:
        preload: file name of a library to preload, or "".
        variables: of its environment.
        turns: one dict for each timed turn, of lists with one value for each step.
        end: its last answer.
    """

    name: str
    allocator: str = "default"
    preload: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    turns: list[dict[str, list[Any]]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)

    def median(self, key: str) -> float:
        """The median over all timed steps."""
        return median(value for turn in self.turns for value in turn[key])

    def rounds(self, key: str) -> list[float]:
        """The median of each round."""
        return [median(turn[key]) for turn in self.turns]


def preload(name: str) -> str | None:
    """The library of a peer, or None: not installed."""
    return ctypes.util.find_library(PEERS[name])


def ratio(one: Contender, other: Contender, key: str = "seconds") -> float:
    """How many times as long `one` took: the median of the rounds' ratios, each of neighbours in time."""
    return median(a / b for a, b in zip(one.rounds(key), other.rounds(key), strict=True))


def race(contenders: Sequence[Contender], workload: str, *, steps: int, warm_up: int, rounds: int) -> None:
    """Let all take turns of `steps`, some untimed and then `rounds`, every second in reverse order.

    Untimed are `warm_up` of them, and more until all are settled, so that steady states are compared.
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
    """A table in Markdown, columns aligned, floats with three digits."""
    cells = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    width = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]
    line = "| " + " | ".join(f"{{:<{w}}}" for w in width) + " |"
    rule = "|" + "|".join("-" * (w + 2) for w in width) + "|"
    return "\n".join(["", title, "", line.format(*columns), rule, *(line.format(*row) for row in cells), ""])

"""Programs over an array module, CuPy or NumPy, in sizes that fit a budget; same seed, same results.

`WORKLOADS` has what is run: how it is made for an array module and a budget in bytes, how many steps it does,
and how many of these, the last ones, are timed. The budget is about what is alive at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import cupy_events
import numpy as np
from cupy_replay import Replay, bytes_of, hash_of

from mempool.demo.network import BATCH, LAYERS, Network

if TYPE_CHECKING:
    from collections.abc import Callable


MOST_BYTES = 4 << 30  # so that twice as much, for an allocator that fragments, fits a card of 24 GB


def budget_bytes(free_bytes: int) -> int:
    """Bytes that a workload may have alive on a card with so many free."""
    return min(MOST_BYTES, free_bytes // 4)


class Workload(Protocol):
    """A program that repeats something."""

    def step(self, number: int) -> None:
        """One iteration; they are numbered from 0."""

    def result(self) -> str:
        """What came out so far, as a hash."""


class Training:
    """A perceptron with Adam, on eight batches in turns."""

    def __init__(self, xp: Any, layers: tuple[int, ...], batch: int) -> None:
        """Make network and data.

        Args:
            xp: the array module.
            layers: values of the input, of each hidden layer, and of the output.
            batch: samples.
        """
        self._network = Network(xp, layers=layers)
        random = xp.random.default_rng(1)
        self._batches = [
            (
                random.standard_normal((batch, layers[0]), dtype=xp.float32),
                random.integers(0, layers[-1], batch),
            )
            for _ in range(8)
        ]
        self._losses: list[str] = []

    def step(self, number: int) -> None:
        """Train on the next batch."""
        self._losses.append(self._network.step(*self._batches[number % len(self._batches)]).hex())

    def result(self) -> str:
        """Of all losses and the parameters."""
        return hash_of(",".join(self._losses).encode(), *map(bytes_of, self._network.parameters))


class Solver:
    """Conjugate gradients on grids of ever other sizes, as a program that refines where it must."""

    def __init__(self, xp: Any, side: int, steps: int, rounds: int = 8) -> None:
        """Choose the grids.

        Args:
            xp: the array module.
            side: points along the largest grid.
            steps: how many grids there are.
            rounds: at most so many on each.
        """
        self._xp, self._rounds = xp, rounds
        self._sides = np.random.default_rng(2).integers(side // 2, side + 1, steps)
        self._norms: list[str] = []

    def step(self, number: int) -> None:
        """Solve on the next grid."""
        xp, side = self._xp, int(self._sides[number])
        residual = (xp.arange(side * side, dtype=xp.float64) % 17 - 8).reshape(side, side)
        solution = xp.zeros_like(residual)
        direction = residual
        square = first = float((residual * residual).sum())
        for _ in range(self._rounds):
            if square <= 1e-6 * first:
                break
            product = _stencil(direction)
            length = square / float((direction * product).sum())
            solution = solution + length * direction
            residual = residual - length * product
            square, before = float((residual * residual).sum()), square
            direction = residual + (square / before) * direction
        self._norms += [square.hex(), float(solution.sum()).hex()]

    def result(self) -> str:
        """Of all residuals and sums."""
        return hash_of(",".join(self._norms).encode())


def _stencil(grid: Any) -> Any:
    """Four times each point and a bit, less its neighbours."""
    result = 4.2 * grid
    result[1:] -= grid[:-1]
    result[:-1] -= grid[1:]
    result[:, 1:] -= grid[:, :-1]
    result[:, :-1] -= grid[:, 1:]
    return result


# --- what is run


class Kind(NamedTuple):
    """A workload, its steps, and how many of these are timed."""

    make: Callable[[Any, int], Workload]
    steps: int
    timed: int


def _training(xp: Any, budget: int) -> Workload:
    # Some 25 float32 arrays of so many values squared are alive at the peak.
    width = min(int((budget / 100) ** 0.5) // 16 * 16, 6144)
    return Training(xp, (784, width, width, width, 10), width)


def _small_training(xp: Any, budget: int) -> Workload:
    return Training(xp, LAYERS, BATCH)  # whose time is launches and allocations; it fits everywhere


def _solver(xp: Any, budget: int) -> Workload:
    return Solver(xp, int((budget / 44) ** 0.5), steps=24)


def _random(xp: Any, budget: int) -> Workload:
    return Replay(xp, [], cupy_events.random_allocations(steps=12, events=150, most_bytes=budget))


def _trace(xp: Any, budget: int) -> Workload:
    return Replay(xp, *cupy_events.generated(steps=20, most_bytes=budget))


def _recorded(xp: Any, budget: int) -> Workload:
    return Replay(xp, [], cupy_events.recorded("gpt.train", steps=20, most_bytes=budget))


WORKLOADS = {
    "training": Kind(_training, 24, 8),
    "small training": Kind(_small_training, 200, 100),
    "solver": Kind(_solver, 24, 12),
    "random allocations": Kind(_random, 12, 6),
    "generated trace": Kind(_trace, 20, 8),
    "recorded GPT": Kind(_recorded, 20, 8),
}

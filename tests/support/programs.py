"""Small programs that allocate like real ones, on any pool, with an observer that checks all addresses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mempool import Pool


class Watched:
    """Allocates and frees in a pool, and asserts that no two live buffers overlap."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.live: dict[int, int] = {}
        self.peak = 0
        self._load = 0

    def allocate(self, size: int, stream: int = 0) -> int:
        address = self.pool.allocate(size, stream=stream)
        for other, length in self.live.items():
            assert address + size <= other or other + length <= address, "two live buffers overlap"
        self.live[address] = size
        self._load += size
        self.peak = max(self.peak, self._load)
        return address

    def free(self, address: int, stream: int = 0) -> None:
        self._load -= self.live.pop(address)
        self.pool.free(address, stream=stream)

    def free_all(self) -> None:
        for address in list(self.live):
            self.free(address)


def layers(memory: Watched, count: int = 20, scale: int = 1024) -> None:
    """Run a forward and a backward pass: activations freed in reverse, each with a short-lived temporary."""
    kept = []
    for layer in range(count):
        kept.append(memory.allocate(scale * (layer % 5 + 1)))
        memory.free(memory.allocate(scale // 2 + 64 * layer + 600))
    while kept:
        memory.free(memory.allocate(scale * 2 + 600))
        memory.free(kept.pop())


def replaced(memory: Watched) -> Callable[[int], None]:
    """Return an iteration of ``x = f(x)``, which frees the old value after making the new one."""
    state = [memory.allocate(40_000)]

    def iteration(_: int) -> None:
        layers(memory)
        fresh = memory.allocate(40_000)
        memory.free(state.pop())
        state.append(fresh)

    return iteration


def last_three(memory: Watched) -> Callable[[int], None]:
    """Return an iteration that keeps the last three outputs."""
    outputs: deque[int] = deque()

    def iteration(_: int) -> None:
        layers(memory)
        outputs.append(memory.allocate(30_000))
        if len(outputs) > 3:
            memory.free(outputs.popleft())

    return iteration


def prefetched(memory: Watched) -> Callable[[int], None]:
    """Return an iteration that loads the next batch before it uses the current batch."""
    queue = [memory.allocate(50_000)]

    def iteration(_: int) -> None:
        queue.append(memory.allocate(50_000))
        layers(memory)
        memory.free(queue.pop(0))

    return iteration


def piling(memory: Watched) -> Callable[[int], None]:
    """Return an iteration of ``losses.append(out)``: one buffer per iteration is never freed."""
    kept: list[int] = []

    def iteration(_: int) -> None:
        layers(memory)
        kept.append(memory.allocate(2_000))

    return iteration


def training(memory: Watched) -> Callable[[int], None]:
    """Return an iteration of training, whose first run makes optimizer state as large as the gradients."""
    shapes = [7_000, 21_000, 13_000]
    parameters = [memory.allocate(size) for size in shapes]
    state: list[int] = []

    def iteration(number: int) -> None:
        layers(memory)
        gradients = [memory.allocate(size) for size in shapes]
        if number == 0:
            state.extend(memory.allocate(size) for size in shapes)
        for size in shapes:
            memory.free(memory.allocate(size + 100))
        for gradient in gradients:
            memory.free(gradient)

    assert parameters
    return iteration

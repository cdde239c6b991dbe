"""NumPy in the place of CuPy, with what the worker uses of ``cupy.cuda``, so that it runs without a GPU."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

import mempool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest


class Pool:
    """Says that it holds a MiB, and keeps what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def malloc(self, size: int) -> object:
        """Something that can be dropped."""
        self.calls.append("malloc")
        return object()

    def total_bytes(self) -> int:
        """In bytes."""
        return 1 << 20

    def step(self) -> None:
        """An iteration ends."""
        self.calls.append("step")

    def wait(self, seconds: float) -> None:
        """The plan is there."""
        self.calls.append("wait")

    def report(self) -> SimpleNamespace:
        """A hit rate, and what nobody asks for."""
        return SimpleNamespace(to_dict=lambda: {"hit_rate": 1.0, "state": "replaying"})


class Standin:
    """What was done to it.

    Attributes:
        pool: the pool that both CuPy and ours are in it.
        options: with which ours was installed.
    """

    def __init__(self, patch: pytest.MonkeyPatch, free_bytes: int) -> None:
        self.pool = Pool()
        self.options: dict[str, Any] = {}
        self._malloc: Callable[[int], object] | None = None
        cupy = ModuleType("cupy")
        cupy.__dict__.update({name: getattr(np, name) for name in dir(np) if not name.startswith("__")})
        cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
            MemoryPool=lambda: self.pool,
            MemoryAsyncPool=self._no_async,
            alloc=lambda size: self._malloc(size) if self._malloc else None,
            runtime=SimpleNamespace(
                memGetInfo=lambda: (free_bytes, 2 * free_bytes), deviceSynchronize=lambda: None
            ),
            set_allocator=self._set,
            using_allocator=self._using,
        )
        ours = ModuleType("mempool.cupy")
        ours.install = self._install  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "cupy", cupy)
        patch.setitem(sys.modules, "mempool.cupy", ours)
        patch.setattr(mempool, "cupy", ours, raising=False)

    def _no_async(self) -> None:
        raise RuntimeError("no such pool")

    def _set(self, malloc: Callable[[int], object]) -> None:
        self._malloc = malloc

    @contextlib.contextmanager
    def _using(self, malloc: None) -> Iterator[None]:
        yield

    def _install(self, **options: Any) -> Pool:
        self.options = options
        self._malloc = self.pool.malloc
        return self.pool

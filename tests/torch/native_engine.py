"""Engine for CPU tensors whose copies the interposer requests, and which makes them as late as allowed."""

from __future__ import annotations

import ctypes
import random
import threading
from typing import Any

from mempool.torch.offload.host_engine import ArenaCopy, HostEngine
from solvers.swap import Link

_POINTER = ctypes.c_void_p
_COPY = ctypes.CFUNCTYPE(
    _POINTER, _POINTER, _POINTER, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, _POINTER
)
_QUERY = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER)
_ORDER = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, _POINTER)
_RELEASE = ctypes.CFUNCTYPE(None, _POINTER)
_PROGRAM, _OUT, _IN = 1, 2, 3


class _Functions(ctypes.Structure):
    _fields_ = [("copy", _COPY), ("has_passed", _QUERY), ("order_before", _ORDER), ("release", _RELEASE)]


class LateCopies:
    """See `NativeCopies`: each stream makes its copies in order, at random moments until awaited."""

    def __init__(self, engine: NativeEngine, size: int, memory: Any) -> None:
        self._engine, self._memory = engine, memory
        self._copies: dict[int, ArenaCopy] = {}
        self._functions = _Functions(
            _COPY(self._copy), _QUERY(self._has_passed), _ORDER(self._order), _RELEASE(lambda _: None)
        )
        self.handles = (
            ctypes.addressof(self._functions), 0, _PROGRAM, _OUT, _IN, engine._memory.address, memory.at
        )  # fmt: skip
        engine._memory.mark_touched(memory.at, size)
        engine.kept.append(self._functions)  # the interposer may hold events

    def _copy(self, _: Any, stream: int, target: int, source: int, size: int, after: int) -> int:
        assert after == _PROGRAM
        self._engine.requested += 1
        return self._engine.request(stream, (target, source, size))

    def _has_passed(self, event: int) -> int:
        if self._engine.random.random() < 0.3:
            self._engine.make(event)
        return self._engine.is_made(event)

    def _order(self, event: int, stream: int) -> int:
        assert stream == _PROGRAM
        if self._engine.refused is not None:
            self._engine.refused += 1
            return 0
        self._engine.make(event)
        return 1

    def release(self, held: list[ArenaCopy], places: list[tuple[int, int]]) -> None:
        self._memory = None
        for copy in held:
            copy.memory = None
        self._copies = {}
        for at, size in places:
            memory = self._engine._free_list.take(size, at)
            assert memory is not None
            assert memory.at == at
            self._copies[at] = ArenaCopy(size, at, memory)

    def copy_at(self, at: int, size: int) -> ArenaCopy:
        assert self._copies[at].size == size
        return self._copies[at]


class NativeEngine(HostEngine):
    """A `HostEngine` that lets the interposer make the moves.

    Attributes:
        requested: number of copies that the interposer requested.
        refused: number of refused waits of the program's stream; None permits the waits.
    """

    streams = True

    def __init__(self, host_bytes: int, seed: int = 0) -> None:
        super().__init__(host_bytes)
        self.random = random.Random(seed)
        self.requested = 0
        self.refused: int | None = None
        self.kept: list[Any] = []
        self._waiting: dict[int, list[tuple[int, tuple[int, int, int]]]] = {_OUT: [], _IN: []}
        self._number, self._time = 0, 0.0

    def native_copies(self, size: int) -> LateCopies | None:  # type: ignore[override]
        memory = self._free_list.take(size)
        return None if memory is None else LateCopies(self, size, memory)

    def link(self) -> Link:
        """Return a slow link, so that several operations run during each copy."""
        return Link.of_rate(2e8)

    def mark(self, prepare: Any = None) -> float:
        """Return the time of a clock by which each operation takes 0.1 ms."""
        super().mark(prepare)
        self._time += 1e-4
        return self._time

    def current_stream(self) -> int:  # type: ignore[override]
        """Return the number of the thread, as if each had a stream of its own."""
        return threading.get_ident()

    def waited(self, transfer: Any) -> float:
        return 0.0

    def request(self, stream: int, copy: tuple[int, int, int]) -> int:
        self._number += 1
        self._waiting[stream].append((self._number, copy))
        return self._number

    def is_made(self, event: int) -> bool:
        return not any(number == event for waiting in self._waiting.values() for number, _ in waiting)

    def make(self, event: int) -> None:
        for waiting in self._waiting.values():
            while waiting and any(number == event for number, _ in waiting):
                ctypes.memmove(*waiting.pop(0)[1])

    def make_all(self) -> None:
        for waiting in self._waiting.values():
            if waiting:
                self.make(waiting[-1][0])

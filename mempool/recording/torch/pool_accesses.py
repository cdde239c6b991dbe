"""Recording of the accesses of PyTorch's operations, joined with the installed pool's allocs and frees.

The recorder of accesses sees tensors that are read and written. The pool sees every allocation, also those
inside kernels, and their addresses. Both use the same clock (CLOCK_MONOTONIC is Python's
`time.perf_counter_ns` on Linux).
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mempool import _core, torch
from mempool.errors import UsageError
from mempool.per_rank_files import own_file
from mempool.recording.events import RECORD, EventConverter
from mempool.recording.torch import AccessRecorder
from mempool.recording.torch.pool_merge import join
from traces.formats.parquet import write_trace

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from mempool.torch import TensorPool
    from traces import Trace

_BLOCK = np.dtype(list(_core.BLOCK_FIELDS))


class AccessRecording:
    """A recording of accesses: see `mempool.torch.record`.

    Attributes:
        trace: the recorded trace, set when the ``with`` block has ended.
    """

    trace: Trace

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        model: nn.Module | Iterable[nn.Module] | None,
        optimizer: Optimizer | Iterable[Optimizer] | None,
    ) -> None:
        self._path = None if path is None else own_file(os.fspath(path))
        self._pool = torch.installed()
        if self._pool is not None and self._pool.settings.mode == "off":
            self._pool = None
        if self._pool is not None and self._pool.settings.record is not None:
            raise UsageError("the pool writes a trace already: record accesses without record=")
        self.recorder = AccessRecorder(_several(model), _several(optimizer), places=self._pool is not None)
        self._tape: PoolTape | None = None

    def own(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Assign tensors to a category of the program, for example "inputs"."""
        self.recorder.own(category, tensors)

    def mark(self, name: str) -> None:
        """Set a mark, as `mempool.recording.torch.AccessRecorder.mark` does."""
        self.recorder.mark(name)

    def step(self) -> None:
        """Mark the end of an iteration; without this call the steps of the optimizer end iterations."""
        self.recorder.step()

    def __enter__(self) -> Self:
        if self._pool is not None:
            folder = None if self._path is None else str(Path(self._path).absolute().parent)
            self._tape = PoolTape(self._pool, folder)
        try:
            self.recorder.__enter__()
        except BaseException:
            if self._tape is not None:
                self._tape.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.recorder.__exit__(kind, error, trace)
        with _core.Bypass():
            table = self.recorder.table()
            seen = self.recorder.trace(table)
            self.trace = seen if self._tape is None else join(self._tape.stop(), seen, table, self.recorder)
            if self._path is not None:
                write_trace(self.trace, self._path)


def _several(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


class PoolTape:
    """Tape of all events of a pool from now on; buffers that are alive now form the beginning."""

    def __init__(self, pool: TensorPool, folder: str | None) -> None:
        self._pool, self._began_ns = pool, time.perf_counter_ns()
        pool.client.set_tracing(True, folder=folder or tempfile.gettempdir())
        _, blocks, _ = _core.snapshot(pool.core)
        self._there = np.frombuffer(blocks, _BLOCK)

    def stop(self) -> Trace:
        """Stop the tape and return the trace, with addresses.

        Raises:
            MemoryError: not all events could be stored.
        """
        client = self._pool.client
        client.set_tracing(False)
        pieces = []
        while packed := client.take_trace():
            pieces.append(np.frombuffer(packed, RECORD))
        if lost := client.state()["trace_lost"]:
            raise MemoryError(f"no room for {lost:,} events of the pool")
        records = np.concatenate([np.empty(0, RECORD), *pieces])
        recording = EventConverter(self._pool.device.alignment, addresses=True)
        return recording.trace(np.concatenate([self._first(records), records]).view(np.uint8))

    def _first(self, records: NDArray[Any]) -> NDArray[Any]:
        """Return allocations for the initially live blocks, except blocks allocated after the tape began."""
        live = self._there[self._there["state"] == _core.BLOCK_STATES.index("live")]
        address, row = np.unique(records["address"], return_index=True)
        new = address[records["kind"][row] == 0]
        live = live[~np.isin(live["address"], new)]
        first = np.zeros(len(live), RECORD)
        first["address"], first["size"] = live["address"], live["requested"]
        first["time_ns"] = self._began_ns
        return first

"""Faults found by ``check=True``: writes outside of live buffers, and invalid frees."""

from __future__ import annotations

import importlib.util
import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mempool import _core
from mempool.logs import log

_lock = threading.RLock()
_all: weakref.WeakSet[FaultCollector] = weakref.WeakSet()


FaultKind = Literal["past_end", "before_begin", "after_free", "double_free", "inside"]


@dataclass(frozen=True)
class Fault:
    """A wrong write or free.

    Attributes:
        kind: type of the fault.
        address: address of the buffer.
        size_bytes: size of the buffer.
        offset_bytes: offset of the first written byte, or of the freed address, from ``address``.
        allocated_at: file and line of the allocation, or None if no Python code ran.
        freed_at: file and line of the free, or None; always None while the buffer lives.
        noticed_at: file and line where the fault was noticed; a wrong write happened some time earlier.
    """

    kind: FaultKind
    address: int
    size_bytes: int
    offset_bytes: int
    allocated_at: str | None
    freed_at: str | None
    noticed_at: str | None

    def __str__(self) -> str:
        allocated = f"allocated at {self.allocated_at or 'an unknown place'}"
        buffer = f"{self.size_bytes:,} bytes at {self.address:#x}, {allocated}"
        if self.kind in ("after_free", "double_free"):
            buffer += f", freed at {self.freed_at or 'an unknown place'}"
        noticed = self.noticed_at or "an unknown place"
        if self.kind == "double_free":
            return f"freed again at {noticed}: {buffer}"
        if self.kind == "inside":
            return (
                f"free of an address {self.offset_bytes:+,} bytes from its beginning at {noticed}: {buffer}"
            )
        what = {"past_end": "past the end", "before_begin": "before the beginning"}.get(
            self.kind, "after the free"
        )
        return f"write {what}, at byte {self.offset_bytes:,}, noticed at {noticed}: {buffer}"


class FaultCollector:
    """A checked client and the faults found.

    Attributes:
        core: allocator with checks, which serves in place of the client.
    """

    def __init__(self, client: _core.Client, name: str) -> None:
        found = (importlib.util.find_spec(package) for package in ("mempool", "numpy"))
        files = [spec.origin for spec in found if spec is not None and spec.origin is not None]
        _core.set_fault_libraries([f"{Path(file).parent}/" for file in files])
        _core.set_fault_listener(_log_all)
        self.core = _core.Checked(client)
        self._name = name
        self._logged = 0
        _all.add(self)

    def faults(self) -> tuple[Fault, ...]:
        """Return the faults so far (the first 256), after checking every redzone."""
        self.core.verify()
        return self._found()

    def _found(self) -> tuple[Fault, ...]:
        return tuple(Fault(*fault) for fault in self.core.faults())

    def log(self) -> None:
        """Log the faults found since the last call."""
        with _lock:
            faults = self._found()
            fresh, self._logged = faults[self._logged :], len(faults)
        for fault in fresh:
            log.error("%s: %s", self._name, fault)

    def end(self) -> None:
        """Check all redzones a last time, and release the quarantine."""
        self.core.verify()
        self.core.flush()


def _log_all() -> None:
    for checking in list(_all):
        checking.log()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)

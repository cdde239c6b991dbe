"""Collection of the faults found by ``check=True``, for `logging` and reports."""

from __future__ import annotations

import importlib.util
import os
import threading
import weakref
from pathlib import Path

from mempool import _core
from mempool.logs import log
from mempool.reporting.faults import Fault

_lock = threading.RLock()
_all: weakref.WeakSet[Checking] = weakref.WeakSet()


class Checking:
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

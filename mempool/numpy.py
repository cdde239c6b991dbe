"""NumPy's arrays in a pool.

    with mempool.numpy.install() as pool:
        for batch in batches:
            train(batch)
            pool.step()
    print(pool.report())

The pool serves all threads, in any context. Arrays from before the installation are resized and freed by
NumPy; arrays of the pool may outlive the pool, their thread, a fork, and the interpreter. NumPy keeps the
pool's functions permanently; without an installed pool, they only call NumPy's functions.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from mempool import _core
from mempool.errors import OutOfMemoryError, UsageError
from mempool.installation import InstallationSlot, slot_of
from mempool.pool import Pool

__all__ = ["ArrayPool", "install", "installed", "is_installed", "uninstall"]


def __dir__() -> list[str]:
    return __all__


def install(**options: Any) -> ArrayPool:
    """Serve the arrays of this process from a new pool, until the pool is closed.

    With the setting ``MEMPOOL=off``, the pool stays empty and NumPy unchanged. With ``check=True``, every
    array lies between redzones, and freed arrays are poisoned and reused late: wrong writes and frees are
    logged when noticed, and listed by `ArrayPool.faults`. Checking costs some microseconds per array.

    Args:
        options: options of `mempool.Pool`; the device is the host.

    Returns:
        The pool; leaving the ``with``, ``close`` and `uninstall` end the service. The report stays readable.

    Raises:
        UsageError: a pool is installed already, or the options are invalid.
        ImportError: the allocator of this NumPy is unknown.
    """
    return _slot.install(lambda: ArrayPool(**options), ArrayPool.serve)


def uninstall() -> None:
    """Close the installed pool and restore NumPy; arrays stay valid. Warns if no pool is installed."""
    _slot.uninstall()


def installed() -> ArrayPool | None:
    """Return the pool that serves NumPy, or None."""
    return _slot.pool


def is_installed() -> bool:
    """Return true if a pool serves NumPy."""
    return _slot.pool is not None


class ArrayPool(Pool):
    """A pool that serves NumPy until closed."""

    framework = "numpy"
    public_names = tuple(name for name in Pool.public_names if name not in ("allocate", "free"))

    def __init__(self, **options: Any) -> None:
        share = options.get("share")
        device = options.get("device") or (share.device if isinstance(share, Pool) else "host")
        if device != "host" and not isinstance(device, _core.HostDevice):
            raise UsageError(f"NumPy's arrays live on the host, not on {device!r}")
        super().__init__(**{"name": "numpy", **options})

    def serve(self) -> None:
        """Install the pool's functions in NumPy."""
        _explain_memory_errors()
        self._hook = _core.numpy_hook()
        self._hook.serve(self.client, None if self._fault_collector is None else self._fault_collector.core)

    def close(self) -> None:
        """Stop serving NumPy, and stop planning. Arrays stay valid."""
        _slot.leave(self, self._stop_serving)
        super().close()

    def _stop_serving(self) -> None:
        if self._fault_collector is not None:
            self._fault_collector.end()
        if self.settings.mode != "off":
            self._hook.stop()


_slot: InstallationSlot[ArrayPool] = slot_of("NumPy", "mempool.numpy")


def _explain_memory_errors() -> None:
    """Add the pool's numbers to NumPy's MemoryError, which has only the requested size."""
    kind = _memory_error()
    if kind is None or hasattr(kind, "_mempool"):
        return
    plain_init, plain_str = kind.__init__, kind.__str__

    def init(self: Any, shape: Any, dtype: Any) -> None:
        plain_init(self, shape, dtype)
        self._mempool = ""
        if _slot.pool is not None:
            numbers = _core.Client.last_out_of_memory()
            if numbers["asked_bytes"] == self._total_size:
                self._mempool = "; " + str(OutOfMemoryError(numbers)).partition("; ")[2]

    def text(self: Any) -> str:
        return f"{plain_str(self)}{self._mempool}"

    kind.__init__, kind.__str__, kind._mempool = init, text, ""


def _memory_error() -> Any:
    """Return NumPy's class of errors for failed array allocations; None if the class has another name."""
    # the second name is that before NumPy 2
    for module in ("numpy._core._exceptions", "numpy.core._exceptions"):
        with contextlib.suppress(ImportError):
            return getattr(importlib.import_module(module), "_ArrayMemoryError", None)
    return None

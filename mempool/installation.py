"""Installation of pools in frameworks: one pool at a time, from any thread and in forked children."""

from __future__ import annotations

import os
import threading
import warnings
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from mempool.errors import UsageError
from mempool.settings import warn_if_untested

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.settings import Settings


class Installable(Protocol):
    """An installable object: a `Pool`, or one object over several pools."""

    settings: Settings

    def close(self) -> None:
        """Stop serving the framework."""

    def renew_locks(self) -> None:
        """Replace locks in a forked child, which lacks the threads that held locks."""


P = TypeVar("P", bound="Installable")
_slots: dict[tuple[str, int], InstallationSlot[Any]] = {}


class InstallationSlot(Generic[P]):
    """Installation slot of one framework (or of one device in a framework).

    Attributes:
        pool: installed pool, or None.
        lock: held while ``pool`` changes.
    """

    def __init__(self, name: str, module: str, index: int = 0) -> None:
        """Make an empty slot.

        Args:
            name: framework's name for messages.
            module: our module for the framework, which has ``uninstall``.
            index: index of the device, in a framework with a slot for each device.
        """
        self.pool: P | None = None
        self.lock = threading.RLock()
        self._name = f"{name}'s device {index}" if index else name
        self._module, self._end = module, f"{module}.uninstall({index or ''})"

    def install(self, make: Callable[[], P], serve: Callable[[P], None]) -> P:
        """Make a pool and start serving, unless the mode is off.

        Raises:
            UsageError: a pool is installed already.
        """
        with self.lock:
            if self.pool is not None:
                raise UsageError(f"{self._name} has a pool already: {self._end} it first")
            warn_if_untested(self._module.rpartition(".")[2])
            pool = make()
            try:
                if pool.settings.mode != "off":
                    serve(pool)
            except BaseException:
                pool.close()
                raise
            self.pool = pool
        return pool

    def uninstall(self) -> None:
        """Close the pool; warn if none is installed."""
        if self.pool is None:
            warnings.warn(f"no pool is installed in {self._name}", RuntimeWarning, stacklevel=3)
        else:
            self.pool.close()

    def leave(self, pool: P, stop: Callable[[], None]) -> None:
        """Empty the slot if this pool is installed, after a call of ``stop``."""
        with self.lock:
            if self.pool is pool:
                stop()
                self.pool = None


def slot_of(name: str, module: str, index: int = 0) -> InstallationSlot[Any]:
    """Return the slot of a framework: one per process, even after a reload of the adapter.

    Args:
        name: framework's name for messages.
        module: our module for the framework, which has ``uninstall``.
        index: index of the device, in a framework with a slot for each device.
    """
    return _slots.setdefault((module, index), InstallationSlot(name, module, index))


def _after_fork_in_child() -> None:
    for slot in list(_slots.values()):
        slot.lock = threading.RLock()
        if slot.pool is not None:
            slot.pool.renew_locks()


os.register_at_fork(after_in_child=_after_fork_in_child)

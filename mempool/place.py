"""Where a framework's pool is installed: one at a time there, by any thread, and in a forked child too."""

from __future__ import annotations

import os
import threading
import warnings
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from mempool.errors import UsageError
from mempool.versions import warn_if_untested

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.settings import Settings


class Installed(Protocol):
    """What can be installed: a `Pool`, or one object over several."""

    settings: Settings

    def close(self) -> None:
        """Leave the framework."""

    def renew_locks(self) -> None:
        """In a forked child, where nobody is left who could give them back."""


P = TypeVar("P", bound="Installed")
_places: dict[tuple[str, int], Place[Any]] = {}


class Place(Generic[P]):
    """The place of a pool in one framework.

    Attributes:
        pool: the one that is installed, or None.
        lock: held while that changes.
    """

    def __init__(self, name: str, module: str, index: int = 0) -> None:
        """An empty place.

        Args:
            name: of the framework, for people.
            module: ours, which has ``uninstall``.
            index: of the device, in a framework that has a place for each.
        """
        self.pool: P | None = None
        self.lock = threading.RLock()
        self._name = f"{name}'s device {index}" if index else name
        self._module, self._end = module, f"{module}.uninstall({index or ''})"

    def install(self, make: Callable[[], P], serve: Callable[[P], None]) -> P:
        """Make a pool and let it serve, unless its mode is off.

        Raises:
            UsageError: there is a pool already.
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
        """Close the pool; warn if there is none."""
        if self.pool is None:
            warnings.warn(f"no pool is installed in {self._name}", RuntimeWarning, stacklevel=3)
        else:
            self.pool.close()

    def leave(self, pool: P, stop: Callable[[], None]) -> None:
        """If this pool is here, it no longer is."""
        with self.lock:
            if self.pool is pool:
                stop()
                self.pool = None


def place_of(name: str, module: str, index: int = 0) -> Place[Any]:
    """The place in a framework: one in the process, however often the adapter is reloaded.

    Args:
        name: of the framework, for people.
        module: ours, which has ``uninstall``.
        index: of the device, in a framework that has a place for each.
    """
    return _places.setdefault((module, index), Place(name, module, index))


def _after_fork_in_child() -> None:
    for place in list(_places.values()):
        place.lock = threading.RLock()
        if place.pool is not None:
            place.pool.renew_locks()


os.register_at_fork(after_in_child=_after_fork_in_child)

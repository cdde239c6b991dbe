"""One pool for each device, behind one object with the interface of `mempool.Pool`."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mempool import _core, sharing
from mempool.cupy.reports import of_devices
from mempool.errors import UsageError
from mempool.pool import Pool
from mempool.reporting.metrics import joint_metrics
from mempool.settings import NEVER, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mempool.cupy.platform import Platform
    from mempool.planning.planned_pattern import PlannedPattern
    from mempool.reporting.report import Report


#: Pool to share, or a function that returns the pool at a device's first array.
Share = Pool | Callable[[], Pool | None] | None


class DevicePool(Pool):
    """Pool of one device."""

    framework = "cupy"
    #: Streams share no memory: a program may wait for another stream's use after the free, if before its next
    #: allocation.
    wait_bytes = NEVER


class Devices:
    """Pools by device index, each made on first use.

    Attributes:
        settings: settings of each pool.
        name: name of the first device's pool; the other names end with the device's index.
    """

    def __init__(self, platform: Platform, name: str, options: dict[str, Any], share: Share) -> None:
        self.settings = settings(**options)
        self.name = name
        self._share = share
        if not (share is None or isinstance(share, Pool) or callable(share)):
            raise UsageError(f"share is {share!r}, not a pool")
        if isinstance(share, Pool):  # check now instead of at the first array
            if not isinstance(share.device, _core.CudaDevice):
                raise UsageError(f"{share!r} is no pool of a CUDA device")
            price = self.settings.wait_bytes
            sharing.check(
                share, self.settings, None, options, DevicePool.wait_bytes if price is None else price
            )
        self._platform, self._options = platform, options
        self._pools: dict[int, DevicePool] = {}
        self._lock = threading.RLock()
        self._scopes: list[tuple[contextlib.ExitStack, str]] = []  # contexts that new pools must enter
        self._closed = self._left_open = False

    def pool(self, index: int) -> DevicePool:
        """Return the pool of a device; make the pool if missing.

        Raises:
            UsageError: no such device.
        """
        with self._lock:
            if index not in self._pools:
                self._pools[index] = self._make(index)
            return self._pools[index]

    @property
    def pools(self) -> dict[int, DevicePool]:
        """Pools made so far, by device index."""
        with self._lock:
            return dict(sorted(self._pools.items()))

    def _shared(self, index: int) -> Pool | None:
        """Return the open pool to share on this device, or None."""
        found = callable(self._share)  # the function may return another device's pool
        share = self._share() if callable(self._share) else self._share
        if share is None:
            return None
        if share.state == "closed":
            if not found:
                text = f"{share!r} was closed before CuPy's first array: that has memory of its own"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            return None
        device = share.device
        assert isinstance(device, _core.CudaDevice)
        if device.index is None and not found and device.bind(index):
            share.client.device_is_bound()
        return share if device.index == index else None

    def _make(self, index: int) -> DevicePool:
        share, options = self._shared(index), dict(self._options)
        device = self._platform.device(index) if share is None else None
        if self._closed:
            options = {"mode": "off", "wait_bytes": options.get("wait_bytes")}
            options |= {} if share else {"max_reserved": self.settings.max_reserved}
        elif self._pools and self.settings.record is not None:
            options["record"] = of_device(self.settings.record, index)
        if self.settings.plan is not None and not self._closed:
            own = of_device(self.settings.plan, index)
            options["plan"] = own if Path(own).is_file() else self.settings.plan
        name = f"{self.name}:{index}" if index else self.name
        made = DevicePool(device, name=name, share=share, **options)
        if self._left_open:
            made.leave_open_at_exit()
        for scope, kind in self._scopes:
            scope.enter_context(getattr(made, kind)())
        return made

    # --- iterations

    @contextlib.contextmanager
    def _scope(self, kind: str) -> Iterator[None]:
        with contextlib.ExitStack() as scope:
            mine = scope, kind
            with self._lock:
                if kind == "iteration" and any(other == kind for _, other in self._scopes):
                    raise UsageError("iteration() inside an iteration of this or another thread")
                for pool in self.pools.values():
                    scope.enter_context(getattr(pool, kind)())
                self._scopes.append(mine)
            try:
                yield
            finally:
                with self._lock:
                    self._scopes.remove(mine)

    def iteration(self) -> contextlib.AbstractContextManager[None]:
        """Mark one iteration, on all devices: ``with pool.iteration():`` around its code.

        Raises:
            UsageError: inside another iteration, of this or any thread.
        """
        return self._scope("iteration")

    def dynamic(self) -> contextlib.AbstractContextManager[None]:
        """Keep allocations inside the context out of plans: for validation, checkpoints, notebooks."""
        return self._scope("dynamic")

    def step(self) -> None:
        """Mark the end of one iteration and the beginning of the next, on all devices.

        Raises:
            UsageError: inside `iteration`, which marks both.
        """
        if any(kind == "iteration" for _, kind in self._scopes):
            raise UsageError("step() inside iteration(): use one of them")
        for pool in self.pools.values():
            pool.step()

    # --- state and reports

    @property
    def state(self) -> str:
        """State of the first used device's pool, or "off", "recording" or "closed" before any use."""
        for pool in self.pools.values():
            return pool.state
        return "closed" if self._closed else "off" if self.settings.mode == "off" else "recording"

    @property
    def planned(self) -> PlannedPattern | None:
        """Plan as of `Pool.planned`: of the first device with a plan."""
        return next((pool.planned for pool in self.pools.values() if pool.planned is not None), None)

    @property
    def plans(self) -> int:
        """Number of plans made for all devices."""
        return sum(pool.plans for pool in self.pools.values())

    def report(self) -> Report:
        """Return counts and sizes of the used device; of several devices, under ``devices``."""
        return of_devices(self.name, {index: pool.report() for index, pool in self.pools.items()})

    def metrics(self) -> dict[str, int | float | str]:
        """Return numbers for a logger as of `Pool.metrics`, combined over all devices."""
        return joint_metrics([pool.metrics() for pool in self.pools.values()], self.state)

    def explain(self) -> str:
        """Return a text about the first divergences from the plans and their remedies."""
        pools = self.pools
        if len(pools) == 1:
            return next(iter(pools.values())).explain()
        return "\n".join(f"device {index}: {pool.explain()}" for index, pool in pools.items())

    def save(self, path: str | Path) -> None:
        """Write the plans: the first device's to ``path``, the others with ``.deviceN`` before the suffix.

        With ``plan=path``, a later process replays each plan from the first iteration.

        Raises:
            UsageError: there is no plan yet.
        """
        pools = {index: pool for index, pool in self.pools.items() if pool.planned is not None}
        if not pools:
            raise UsageError("there is no plan yet: no iteration has been seen to repeat")
        for number, (index, pool) in enumerate(pools.items()):
            pool.save(of_device(str(path), index) if number else path)

    # --- planning and the end

    def plan_now(self) -> bool:
        """Search the recordings in the calling thread; return true if a plan was installed."""
        return any(tuple(pool.plan_now() for pool in self.pools.values()))

    def wait(self, seconds: float = 10.0) -> bool:
        """Wait at most ``seconds`` until each used device has a plan; return true if all have one."""
        pools = self.pools
        return bool(pools) and all(tuple(pool.wait(seconds) for pool in pools.values()))

    def trim(self) -> None:
        """Return free segments to all devices, as `Pool.trim`."""
        for pool in self.pools.values():
            pool.trim()

    def release(self) -> bool:
        """Return all free memory to all devices, as `Pool.release`."""
        return all(tuple(pool.release() for pool in self.pools.values()))

    def close_pools(self) -> None:
        """Stop planning; later requests, also on new devices, are served without plans."""
        self._closed = True
        # after an error, the other pools still write their traces
        with contextlib.ExitStack() as each:
            for pool in self.pools.values():
                each.callback(pool.close)

    def renew_locks(self) -> None:
        """Replace locks in a forked child, as `Pool.renew_locks`."""
        self._lock = threading.RLock()
        for pool in self._pools.values():
            pool.renew_locks()

    def leave_open_at_exit(self) -> None:
        """Leave the pools open at the exit of Python; the caller closes them later."""
        self._left_open = True
        for pool in self.pools.values():
            pool.leave_open_at_exit()


def of_device(path: str, index: int) -> str:
    """Return the file name of another device's plan."""
    name = Path(path)
    return str(name.with_name(f"{name.stem}.device{index}{name.suffix}"))

"""A pool for each device, behind one object that is used like a `mempool.Pool`."""

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
from mempool.settings import NEVER, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mempool.cupy.platform import Platform
    from mempool.planned import Planned
    from mempool.report import Report


#: Whose memory to use, or what finds that out when a device's first array is made.
Share = Pool | Callable[[], Pool | None] | None


class DevicePool(Pool):
    """One device's."""

    framework = "cupy"
    #: Programs may have a use by another stream waited for after the free, before their next allocation.
    wait_bytes = NEVER


class Devices:
    """Pools by the index of their device, each made when it is first asked for.

    Attributes:
        settings: of each pool.
        name: of the first; others have their device's index behind it.
    """

    def __init__(self, platform: Platform, name: str, options: dict[str, Any], share: Share) -> None:
        self.settings = settings(**options)
        self.name = name
        self._share = share
        if not (share is None or isinstance(share, Pool) or callable(share)):
            raise UsageError(f"share is {share!r}, not a pool")
        if isinstance(share, Pool):  # what would otherwise be said at the first array
            if not isinstance(share.device, _core.CudaDevice):
                raise UsageError(f"{share!r} is no pool of a CUDA device")
            price = self.settings.wait_bytes
            sharing.check(
                share, self.settings, None, options, DevicePool.wait_bytes if price is None else price
            )
        self._platform, self._options = platform, options
        self._pools: dict[int, DevicePool] = {}
        self._lock = threading.RLock()
        self._scopes: list[tuple[contextlib.ExitStack, str]] = []  # which a new pool enters too
        self._closed = self._left_open = False

    def pool(self, index: int) -> DevicePool:
        """The pool of a device, made if there is none.

        Raises:
            UsageError: there is no such device.
        """
        with self._lock:
            if index not in self._pools:
                self._pools[index] = self._make(index)
            return self._pools[index]

    @property
    def pools(self) -> dict[int, DevicePool]:
        """Those that were made so far, by the device's index."""
        with self._lock:
            return dict(sorted(self._pools.items()))

    def _shared(self, index: int) -> Pool | None:
        """The pool whose memory this device's pool uses, if that is of this device and serves."""
        found = callable(self._share)  # by somebody who does not know either which device it is of
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
        """Keep what is allocated inside out of plans: for validation, checkpoints, notebooks."""
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

    # --- what is known

    @property
    def state(self) -> str:
        """As `Pool.state`: of the first device that is used, "off" or "recording" before."""
        for pool in self.pools.values():
            return pool.state
        return "closed" if self._closed else "off" if self.settings.mode == "off" else "recording"

    @property
    def planned(self) -> Planned | None:
        """As `Pool.planned`: of the first device that has a plan."""
        return next((pool.planned for pool in self.pools.values() if pool.planned is not None), None)

    @property
    def plans(self) -> int:
        """How many plans were made, for all devices."""
        return sum(pool.plans for pool in self.pools.values())

    def report(self) -> Report:
        """Counts and sizes: of the device that is used, or of each under ``devices`` if there are several."""
        return of_devices(self.name, {index: pool.report() for index, pool in self.pools.items()})

    def explain(self) -> str:
        """The first divergences from the plans and what would help against them."""
        pools = self.pools
        if len(pools) == 1:
            return next(iter(pools.values())).explain()
        return "\n".join(f"device {index}: {pool.explain()}" for index, pool in pools.items())

    def save(self, path: str | Path) -> None:
        """Write the plans: the first device's under this name, others with ``.deviceN`` before its end.

        Given as ``plan=path`` in a later process, each is replayed from the first iteration.

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
        """Look at the recordings here and now; True if one gave a plan."""
        return any(tuple(pool.plan_now() for pool in self.pools.values()))

    def wait(self, seconds: float = 10.0) -> bool:
        """Wait until each device that is used has a plan; False if one has none after that time."""
        pools = self.pools
        return bool(pools) and all(tuple(pool.wait(seconds) for pool in pools.values()))

    def trim(self) -> None:
        """As `Pool.trim`, on all devices."""
        for pool in self.pools.values():
            pool.trim()

    def release(self) -> bool:
        """As `Pool.release`, on all devices."""
        return all(tuple(pool.release() for pool in self.pools.values()))

    def close_pools(self) -> None:
        """Stop planning; what still asks is served, on devices that come later too."""
        self._closed = True
        with contextlib.ExitStack() as each:  # one that cannot write its trace does not keep others from it
            for pool in self.pools.values():
                each.callback(pool.close)

    def renew_locks(self) -> None:
        """As `Pool.renew_locks`."""
        self._lock = threading.RLock()
        for pool in self._pools.values():
            pool.renew_locks()

    def leave_open_at_exit(self) -> None:
        """Do not close when Python exits: whoever calls this does, later."""
        self._left_open = True
        for pool in self.pools.values():
            pool.leave_open_at_exit()


def of_device(path: str, index: int) -> str:
    """The name of another device's file beside the first one's."""
    name = Path(path)
    return str(name.with_name(f"{name.stem}.device{index}{name.suffix}"))

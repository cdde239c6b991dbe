"""CuPy's arrays in a pool for each device."""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from typing import TYPE_CHECKING, Any, Self

from mempool import _core, cuda
from mempool.cupy.captures import Captures
from mempool.cupy.devices import DevicePool, Devices, Share
from mempool.cupy.platform import Cuda
from mempool.cupy.statistics import Statistics
from mempool.errors import UsageError
from mempool.installation import InstallationSlot, slot_of
from mempool.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from mempool.cupy.platform import Platform


class CupyPool(Devices, Statistics):
    """CuPy's arrays on all devices. All methods may be called by any thread.

    The methods of `mempool.Pool` apply to each device. The methods of ``cupy.cuda.MemoryPool`` exist too;
    ``malloc`` can also be given to ``using_allocator`` by hand.

    Attributes:
        malloc: CuPy's allocator: takes a number of bytes, returns a ``MemoryPointer``.
    """

    def __init__(
        self, *, platform: Platform | None = None, name: str = "cupy", share: Share = None, **options: Any
    ) -> None:
        """Make the pool, without a device.

        Args:
            platform: provider of devices and streams.
            name: name for reports and logs.
            share: pool of a CUDA device whose memory to use there, or a function that finds the pool at the
                first array.
            options: fields of `mempool.settings.Settings`, for each device.

        Raises:
            UsageError: no driver or GPU, an unknown option, or an impossible value.
        """
        from cupy.cuda import memory

        super().__init__(Cuda() if platform is None else platform, name, options, share)
        if self.settings.check:
            raise UsageError("check=True writes around every buffer: on the host only")
        if self.settings.mode != "off":
            self._platform.check()
        self._serving = False
        self._before: Any = None  # CuPy's allocator
        self._earlier: Any = None  # CuPy's pool
        self._captures = Captures(self._pool_here, lambda: self.pools)
        self._mine = threading.local()  # driver's refusals at this thread's first failed attempt
        kinds = memory.UnownedMemory, memory.MemoryPointer
        self.malloc = _core.cupy_allocator(*kinds, self._client, self._shortage, *self._platform.current())

    def _client(self, index: int) -> _core.Client:
        return self.pool(index).client

    def _make(self, index: int) -> DevicePool:
        made = super()._make(index)
        self._captures.join(made.core)
        return made

    def _here(self) -> DevicePool | None:
        return self._pools.get(self.malloc.device())

    def _pool_here(self) -> tuple[int, DevicePool]:
        index = self.malloc.device()
        return index, self.pool(index)

    def _shortage(self, index: int, size: int, again: bool) -> bool:  # noqa: FBT001 - called from C
        """Handle an unserved request: return true for another try, or raise an error."""
        pool = self._pools[index]
        refusals = int(getattr(pool.device, "refusals", 0))
        self._captures.settle()
        if not again:
            self._mine.refusals = refusals
            self._free_earlier(pool)
            return True
        numbers = _core.Client.last_out_of_memory()
        if isinstance(pool.device, _core.CudaDevice) and refusals != self._mine.refusals:
            raise RuntimeError(cuda.refusal_message(pool.device, size))
        from mempool.cupy.out_of_memory import OutOfMemoryError

        raise OutOfMemoryError(numbers)

    def free_all_blocks(self, stream: Any = None) -> None:
        """Return free memory to the device: the pool's, and that in CuPy's own earlier pool."""
        self._captures.settle()
        super().free_all_blocks(stream)
        self._free_earlier(*self.pools.values())

    def _free_earlier(self, *pools: Pool) -> None:
        """Free the memory in CuPy's own earlier pool, except during a capture, which that would break."""
        if self._earlier is None or any(self._captures.going_on(pool.core) for pool in pools):
            return
        from cupy.cuda.runtime import CUDARuntimeError

        with contextlib.suppress(CUDARuntimeError):  # then nothing is gained, and our own error is raised
            self._earlier.free_all_blocks()

    # --- CuPy

    def serve(self) -> None:
        """Install the pool in CuPy.

        Raises:
            UsageError: inside ``using_allocator``.
        """
        import cupy

        before = cupy.cuda.get_allocator()
        try:
            cupy.cuda.set_allocator(self.malloc)
        except ValueError:
            raise UsageError(
                "CuPy keeps its allocator inside using_allocator: install the pool outside"
            ) from None
        self._before, self._earlier = before, cupy.get_default_memory_pool()
        cupy._default_memory_pool = self
        self._captures.watch()
        self._serving = True

    def _stop_serving(self, *, anyhow: bool = False) -> None:
        if not self._serving:
            return
        import cupy

        self._captures.stop(anyhow=anyhow)
        here = cupy.cuda.get_allocator()
        try:
            cupy.cuda.set_allocator(self._before if here is self.malloc else here)
        except ValueError:
            self._captures.watch()
            raise UsageError(
                "CuPy keeps its allocator inside using_allocator: uninstall the pool outside"
            ) from None
        if here is not self.malloc:
            warnings.warn(
                "CuPy's allocator is not the pool's any more: it is left as it is",
                RuntimeWarning,
                stacklevel=5,
            )
        if cupy.get_default_memory_pool() is self:
            cupy._default_memory_pool = self._earlier
        self._serving = False

    def renew_locks(self) -> None:
        """Replace locks in a forked child, as `mempool.Pool.renew_locks`."""
        super().renew_locks()
        self._captures.renew_lock()

    def release_graphs(self) -> None:
        """Release the memory of all graphs captured so far; the caller must not launch them any more."""
        self._captures.release()

    def close(self) -> None:
        """Leave CuPy and stop planning. Arrays stay valid, and later requests are served without plans.

        Raises:
            UsageError: inside ``using_allocator``, or while a graph is captured.
        """
        self._close(self._stop_serving)

    def _close(self, stop: Callable[[], None]) -> None:
        slot.leave(self, stop)
        self.close_pools()

    def __dir__(self) -> list[str]:
        names = (*Pool.public_names, *vars(Statistics), "malloc", "pools")
        return [name for name in names if name[0] != "_" and hasattr(self, name)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An error may be raised in the middle of a capture, and must reach the program unchanged.
        self._close(functools.partial(self._stop_serving, anyhow=error is not None))

    def __repr__(self) -> str:
        return f"<mempool.cupy.CupyPool {self.name!r}: {self.state}>"

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()


slot: InstallationSlot[CupyPool] = slot_of("CuPy", "mempool.cupy")

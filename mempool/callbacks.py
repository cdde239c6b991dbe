"""Pools for frameworks that call Python for each buffer on a CUDA device, such as Numba and RMM.

Such a buffer may be over for Python while kernels still use it on streams that nobody named. It is free when
the device has been waited for, which happens outside the pool's lock, and not while a graph is captured.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from mempool import _core, cuda, sharing
from mempool.errors import OutOfMemoryError, UsageError
from mempool.pool import Pool
from mempool.settings import NEVER, settings
from mempool.streams import number


class CallbackPool(Pool):
    """A pool of a CUDA device whose framework calls Python; a closed one goes on serving, without plans."""

    #: The streams of one framework do not know of the uses that another one waits for.
    wait_bytes = NEVER

    def __init__(
        self,
        index: int | None = None,
        *,
        driver: str = cuda.DRIVER,
        share: Pool | None = None,
        **options: Any,
    ) -> None:
        """Make a pool for the device of this index, or for the first that asks.

        Raises:
            UsageError: there is no driver, no such device or no such memory on it, or the pool to share has
                another device.
        """
        if not isinstance(index, int | None) or isinstance(index, bool):
            raise UsageError(f"index is {index!r}, not the number of a device")
        memory = settings(memory=options.get("memory")).memory
        share = sharing.pool_of(share, index)
        self._cuda: _core.CudaDevice = sharing.cuda_device(index, driver, share, memory)
        cuda.check(self._cuda)
        super().__init__(self._cuda, share=share, **{"name": self.framework, **options})
        self._over: deque[int] = deque()  # appended to inside garbage collections, too

    @property
    def index(self) -> int | None:
        """Of the device; None while nobody has decided."""
        return self._cuda.index

    def bind(self, index: int) -> None:
        """The framework uses the device of this index.

        Raises:
            UsageError: the pool is of another one.
        """
        if not self._cuda.bind(index):
            raise UsageError(f"the pool is of CUDA device {self.index}, not {index}: it serves one device")
        self.client.device_is_bound()

    def allocate(self, size: int, *, stream: int = 0) -> int:
        """As `mempool.Pool.allocate`.

        Raises:
            RuntimeError: the driver refused for another reason than want of memory, which it gives.
        """
        refusals = self._cuda.refusals
        try:
            return super().allocate(size, stream=stream)
        except OutOfMemoryError:
            if self._cuda.refusals == refusals:
                raise
            raise RuntimeError(cuda.refused(self._cuda, size)) from None

    def take(self, size: int, stream: int = 0) -> int:
        """Address of ``size`` bytes, first used on ``stream``; what is over is given back first.

        Raises:
            OutOfMemoryError: with the numbers; the pool stays usable.
            UsageError: a graph is being captured on the stream.
            RuntimeError: as `allocate`.
        """
        stream = number(stream)
        if _core.cupy_capture(self.core, stream):
            raise UsageError(
                f"a graph is being captured on stream {stream:#x}, and would use the memory of these "
                f"{size:,} bytes long after it is somebody else's: allocate before the capture"
            )
        self.settle()
        return self.allocate(size, stream=stream)

    def give(self, address: int, stream: int) -> None:
        """Give a buffer back whose last use is queued on ``stream``, or done. Never raises."""
        self.client.free(address, number(stream))

    def give_later(self, address: int) -> None:
        """The same, without waiting: with the next one, or before the next buffer. Never raises."""
        self._over.append(address)

    def give_when_done(self, address: int) -> None:
        """Give a buffer back that streams may use of which nothing is known. Never raises."""
        self._over.append(address)
        self.settle()

    def settle(self) -> bool:
        """Wait for the device and give back what is over; False if it cannot be waited for now."""
        over = []
        while self._over:
            try:
                over.append(self._over.popleft())
            except IndexError:  # another thread was faster
                break
        if not over:
            return True
        if not self.core.wait_for_device():
            self._over.extend(over)
            return False
        for address in over:
            self.client.free(address)
        return True

    def close(self) -> None:
        """Go on without plans, as a caching allocator. Buffers stay valid."""
        super().close()
        self.client.drop_patterns()
        sharing.keep_as_closed(self)

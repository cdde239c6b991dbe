"""Pools for frameworks that call Python for each buffer on a CUDA device, such as Numba and RMM.

Kernels on unknown streams may still use a buffer after Python dropped its object. The buffer is therefore
freed after a wait for the device. The wait happens outside the pool's lock, and never during the capture of a
graph.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from mempool import _core, cuda, sharing
from mempool.errors import OutOfMemoryError, UsageError
from mempool.pool import Pool
from mempool.settings import NEVER, settings
from mempool.streams import stream_number


class CallbackPool(Pool):
    """A pool of a CUDA device whose framework calls Python; serves without plans after `close`."""

    #: Streams share no memory, since one framework does not know another framework's uses of a stream.
    wait_bytes = NEVER

    def __init__(
        self,
        index: int | None = None,
        *,
        driver: str = cuda.DRIVER,
        share: Pool | None = None,
        **options: Any,
    ) -> None:
        """Make a pool for device number `index`, or for the first device that allocates.

        Raises:
            UsageError: the driver, the device or the kind of memory does not exist, or the pool to share has
                another device.
        """
        if not isinstance(index, int | None) or isinstance(index, bool):
            raise UsageError(f"index is {index!r}, not the number of a device")
        memory = settings(memory=options.get("memory")).memory or self.memory
        share = sharing.pool_of(share, index)
        self._cuda: _core.CudaDevice = sharing.cuda_device(index, driver, share, memory)
        cuda.check(self._cuda)
        super().__init__(self._cuda, share=share, **{"name": self.framework, **options})
        self._over: deque[int] = deque()  # a garbage collection may append at any time

    @property
    def index(self) -> int | None:
        """Index of the device; None until a device is chosen."""
        return self._cuda.index

    def bind(self, index: int) -> None:
        """Bind the pool to the device of this index.

        Raises:
            UsageError: the pool belongs to another device.
        """
        if not self._cuda.bind(index):
            raise UsageError(f"the pool is of CUDA device {self.index}, not {index}: it serves one device")
        self.client.device_is_bound()

    def allocate(self, size: int, *, stream: int = 0) -> int:
        """Allocate as `mempool.Pool.allocate` does.

        Raises:
            RuntimeError: the driver refused for another reason than lack of memory; the message has the
                reason.
        """
        refusals = self._cuda.refusals
        try:
            return super().allocate(size, stream=stream)
        except OutOfMemoryError:
            if self._cuda.refusals == refusals:
                raise
            raise RuntimeError(cuda.refusal_message(self._cuda, size)) from None

    def take(self, size: int, stream: int = 0) -> int:
        """Return the address of ``size`` bytes, first used on ``stream``; free dropped buffers first.

        Raises:
            OutOfMemoryError: no memory, with the numbers; the pool stays usable.
            UsageError: a graph is being captured on the stream.
            RuntimeError: see `allocate`.
        """
        stream = stream_number(stream)
        if _core.cupy_capture(self.core, stream):
            raise UsageError(
                f"a graph is being captured on stream {stream:#x}, and would use the memory of these "
                f"{size:,} bytes long after it is somebody else's: allocate before the capture"
            )
        self.settle()
        return self.allocate(size, stream=stream)

    def give(self, address: int, stream: int) -> None:
        """Free a buffer whose last use is queued on ``stream`` or complete. Never raises."""
        self.client.free(address, stream_number(stream))

    def give_later(self, address: int) -> None:
        """Drop a buffer without waiting: the next free or allocation frees its memory. Never raises."""
        self._over.append(address)

    def give_when_done(self, address: int) -> None:
        """Wait for the device, then free a buffer that unknown streams may use. Never raises."""
        self._over.append(address)
        self.settle()

    def settle(self) -> bool:
        """Wait for the device and free dropped buffers; return false if waiting is impossible now."""
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
        """Continue without plans, as a caching allocator. Buffers stay valid."""
        super().close()
        self.client.drop_patterns()
        sharing.keep_as_closed(self)

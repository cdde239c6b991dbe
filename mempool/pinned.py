"""Pool of page-locked host memory, for asynchronous copies to and from a GPU.

    pinned = mempool.pinned.PinnedPool()
    batch = pinned.empty((64, 784), "f4")
    ...  # queue a copy from it on a stream
    pinned.used_by(batch, stream)
    del batch  # the memory is reused once the copy has ended

    cupy.cuda.set_pinned_memory_allocator(pinned.malloc)  # for CuPy's own copies

The host writes to pinned memory without waiting for streams. So before freed memory is reused, the pool waits
for all streams that used it.
"""

from __future__ import annotations

import ctypes
import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from mempool import _core, cuda
from mempool.pool import Pool
from mempool.streams import stream_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import DTypeLike, NDArray

#: Stream number of the host's own work; unknown to the driver, and always empty.
HOST = -(1 << 62)


class PinnedPool(Pool):
    """A pool of page-locked host memory, for copies on the streams of one GPU.

    The memory has the same address on every GPU; a free waits for streams of other GPUs.
    """

    #: False, since the environment's settings (a plan, a limit) are for the GPU's memory.
    reads_environment = False

    def __init__(self, index: int = 0, *, driver: str = cuda.DRIVER, **options: Any) -> None:
        """Make a pool of memory that GPU number `index` page-locks, for use by all GPUs.

        Raises:
            UsageError: the driver or the GPU does not exist, or the options are invalid.
        """
        device = cuda.check(cuda.device(index, driver, "pinned"))
        super().__init__(device, **{"name": "pinned", **options})

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = float) -> NDArray[Any]:
        """Return an uninitialized array of page-locked memory; the array may outlive the pool.

        Raises:
            OutOfMemoryError: no memory, with the numbers; the pool stays usable.
        """
        kind = np.dtype(dtype)
        shape = (operator.index(shape),) if hasattr(shape, "__index__") else tuple(shape)
        if (size := math.prod(shape) * kind.itemsize) == 0:
            return np.empty(shape, kind)
        owner = _Buffer(self, size)
        memory: Any = (ctypes.c_ubyte * size).from_address(owner.ptr)
        memory.owner = owner  # views keep the owner alive
        return np.frombuffer(memory, kind).reshape(shape)

    def used_by(self, array: NDArray[Any], stream: Any) -> None:
        """Declare that a copy from or to the array, or a part of the array, is queued on a stream.

        A default stream means the default stream of the current GPU.

        Args:
            array: array of this or another pool of pinned memory.
            stream: an object with the stream's handle as ``ptr``, such as CuPy's, which is kept until the
                array's end; or the handle of a stream that lives as long.

        Raises:
            TypeError: the stream is neither.
            ValueError: the array's memory is not from a pool of pinned memory.
        """
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        owner = getattr(base.obj if isinstance(base, memoryview) else base, "owner", None)
        if not isinstance(owner, _Buffer):
            raise ValueError("the array's memory is not of a pool of pinned memory")
        owner.used_by(stream)

    def malloc(self, size: int) -> Any:
        """Allocate for CuPy, as the argument of `cupy.cuda.set_pinned_memory_allocator`.

        A reuse waits for the streams that are current at the allocation and at the free, and for CuPy's own
        copy streams. While another GPU is current, CuPy's own pool serves.

        Returns:
            A `cupy.cuda.PinnedMemoryPointer`.

        Raises:
            OutOfMemoryError: no memory, with the numbers; the pool stays usable.
        """
        import cupy

        if _current_device() != self.device.index:  # type: ignore[attr-defined]
            return cupy.get_default_pinned_memory_pool().malloc(size)
        return cupy.cuda.PinnedMemoryPointer(_Buffer(self, size, _current_stream), 0)


class _Buffer:
    """Owner of one buffer; frees the memory when the last reference ends.

    Attributes:
        ptr: address.
        size: size in bytes.
        streams: streams that may use the memory, by the core's stream number and the stream's context (0 for
            the device's own); the objects are kept alive.
    """

    def __init__(self, pool: PinnedPool, size: int, current: Callable[[], Any] | None = None) -> None:
        self._client, self._current, self.size = pool.client, current, size
        self._device: _core.CudaDevice = pool.device  # type: ignore[assignment]
        self.streams: dict[tuple[int, int], Any] = {}
        if current is not None:
            self.used_by(current())
        self.ptr = pool.allocate(size, stream=HOST)

    def used_by(self, stream: Any) -> None:
        """Note a stream, given as an object or a handle, that uses the memory."""
        name = stream_number(operator.index(getattr(stream, "ptr", stream)))
        self.streams[name, self._device.context_of(name)] = stream

    def __del__(self) -> None:
        if (address := getattr(self, "ptr", 0)) == 0:
            return
        try:
            if self._current is not None:
                self.used_by(self._current())
            for stream, context in self.streams:
                if context == 0:
                    self._client.use(address, stream)
                elif not self._device.wait_elsewhere(context, stream):
                    return  # keep the memory, since its uses are unknown
        except Exception:  # e.g. during exit: uses are unknown, so keep the memory
            return
        self._client.free(address, HOST)


def _current_stream() -> Any:
    import cupy

    return cupy.cuda.get_current_stream()


def _current_device() -> int:
    import cupy

    return int(cupy.cuda.runtime.getDevice())

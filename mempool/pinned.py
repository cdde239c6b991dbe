"""Page-locked memory of the host, pooled, for copies to and from a GPU that nobody waits for.

    pinned = mempool.pinned.PinnedPool()
    batch = pinned.empty((64, 784), "f4")
    ...  # queue a copy from it on a stream
    pinned.used_by(batch, stream)
    del batch  # the memory serves the next one when the stream is through with the copy

    cupy.cuda.set_pinned_memory_allocator(pinned.malloc)  # for all that CuPy copies

Unlike a GPU's memory it is written by the host itself, which no stream orders: so what is freed waits for
the streams that used it, wherever it goes next.
"""

from __future__ import annotations

import ctypes
import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from mempool import _core, cuda
from mempool.pool import Pool
from mempool.streams import number

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import DTypeLike, NDArray

#: The host's own work as a stream: no driver knows it, and nothing is ever queued there.
HOST = -(1 << 62)


class PinnedPool(Pool):
    """A pool of page-locked host memory, for copies on the streams of one GPU.

    Every GPU reaches the memory by the same address; streams of another are waited for when an array goes.
    """

    #: What the environment says (a plan, a limit) is meant for the GPU's memory.
    reads_environment = False

    def __init__(self, index: int = 0, *, driver: str = cuda.DRIVER, **options: Any) -> None:
        """Make a pool whose memory is locked through the GPU of this index; others reach it as well.

        Raises:
            UsageError: no driver or no such GPU, or the options make no sense.
        """
        device = cuda.check(cuda.device(index, driver, "pinned"))
        super().__init__(device, **{"name": "pinned", **options})

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike = float) -> NDArray[Any]:
        """An array of page-locked memory, as `numpy.empty`; it may outlive the pool.

        Raises:
            OutOfMemoryError: with the numbers; the pool stays usable.
        """
        kind = np.dtype(dtype)
        shape = (operator.index(shape),) if hasattr(shape, "__index__") else tuple(shape)
        if (size := math.prod(shape) * kind.itemsize) == 0:
            return np.empty(shape, kind)
        owner = _Buffer(self, size)
        memory: Any = (ctypes.c_ubyte * size).from_address(owner.ptr)
        memory.owner = owner  # views keep it
        return np.frombuffer(memory, kind).reshape(shape)

    def used_by(self, array: NDArray[Any], stream: Any) -> None:
        """Say that a copy from or to the array, or a part of it, is queued on a stream.

        A default stream is that of the GPU that is current.

        Args:
            array: of this or another pool of pinned memory.
            stream: an object with its handle as ``ptr``, such as CuPy's, which is kept until the array goes;
                or the handle, of a stream that lives until then.

        Raises:
            TypeError: the stream is neither.
            ValueError: the array's memory is not of a pool of pinned memory.
        """
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        owner = getattr(base.obj if isinstance(base, memoryview) else base, "owner", None)
        if not isinstance(owner, _Buffer):
            raise ValueError("the array's memory is not of a pool of pinned memory")
        owner.used_by(stream)

    def malloc(self, size: int) -> Any:
        """What `cupy.cuda.set_pinned_memory_allocator` takes.

        The streams that are current when it is called and when the memory goes are waited for, and those that
        CuPy itself copies on. While another GPU is current CuPy's own pool serves.

        Returns:
            A `cupy.cuda.PinnedMemoryPointer`.

        Raises:
            OutOfMemoryError: with the numbers; the pool stays usable.
        """
        import cupy

        if _current_device() != self.device.index:  # type: ignore[attr-defined]
            return cupy.get_default_pinned_memory_pool().malloc(size)
        return cupy.cuda.PinnedMemoryPointer(_Buffer(self, size, _current_stream), 0)


class _Buffer:
    """Frees its memory when nobody has it any more.

    Attributes:
        ptr: its address.
        size: in bytes.
        streams: those that may be at work on it, by the core's number and the context they are of, where that
            is not the device's own; objects are kept, so that they exist.
    """

    def __init__(self, pool: PinnedPool, size: int, current: Callable[[], Any] | None = None) -> None:
        self._client, self._current, self.size = pool.client, current, size
        self._device: _core.CudaDevice = pool.device  # type: ignore[assignment]
        self.streams: dict[tuple[int, int], Any] = {}
        if current is not None:
            self.used_by(current())
        self.ptr = pool.allocate(size, stream=HOST)

    def used_by(self, stream: Any) -> None:
        """A stream, or its handle."""
        name = number(operator.index(getattr(stream, "ptr", stream)))
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
                    return  # it is kept, as long as its end is not known
        except Exception:  # as while Python ends: who is at work on it is not known, so it is kept
            return
        self._client.free(address, HOST)


def _current_stream() -> Any:
    import cupy

    return cupy.cuda.get_current_stream()


def _current_device() -> int:
    import cupy

    return int(cupy.cuda.runtime.getDevice())

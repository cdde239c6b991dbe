"""What the pool asks of CuPy and of the driver: which device and stream are current, and what a device is."""

from __future__ import annotations

from typing import Any, Protocol

from mempool import _core, cuda
from mempool.cuda import DRIVER
from mempool.errors import UsageError


class Platform(Protocol):
    """Devices by the index that CuPy gives them."""

    def check(self) -> None:
        """Raise `UsageError` where nothing can be served."""

    def device(self, index: int) -> _core.Device:
        """The device of this index."""

    def current(self) -> tuple[Any, Any]:
        """What answers with the index of the current device, and with the handle of the current stream.

        Either a capsule of the C function, named by its type as Cython does, or something to call.
        """


class Cuda:
    """The CUDA devices that CuPy sees."""

    def __init__(self, driver: str = DRIVER, *, start: bool = True, memory: str = "plain") -> None:
        self._driver, self._start, self._memory = driver, start, memory

    def is_there(self) -> bool:
        """Whether there is a driver; does not start it."""
        try:
            _core.CudaDevice(driver=self._driver)
        except RuntimeError:
            return False
        return True

    def check(self) -> None:
        """Find out now what would otherwise fail at the first array.

        Raises:
            UsageError: with what to do about it.
        """
        from cupy.cuda import runtime

        if runtime.is_hip:
            raise UsageError("this CuPy is built for AMD's ROCm; the pool serves CUDA devices only")
        try:
            cuda.device(None, self._driver, self._memory)
            if not self._start:
                return
            if runtime.getDeviceCount() == 0:
                raise UsageError("CuPy sees no CUDA device; does CUDA_VISIBLE_DEVICES hide them?")
            self.device(0)  # whether there is such memory
        except RuntimeError as error:  # ours, or CuPy's
            text = str(error) if isinstance(error, UsageError) else cuda.advised(error)
            raise UsageError(f"CuPy has no GPU to use here: {text}") from None

    def device(self, index: int) -> _core.CudaDevice:
        """The device of this index.

        Raises:
            UsageError: there is none, or the driver does not start, with what to do about it.
        """
        return cuda.check(cuda.device(index, self._driver, self._memory))

    def current(self) -> tuple[Any, Any]:
        """CuPy's own functions in C, or where a version of it has none, in Python."""
        import cupy
        from cupy_backends.cuda import stream
        from cupy_backends.cuda.api import runtime

        return (
            _exported(runtime, "getDevice") or runtime.getDevice,
            _exported(stream, "get_current_stream_ptr") or (lambda: cupy.cuda.get_current_stream().ptr),
        )


def _exported(module: Any, name: str) -> Any:
    """A C function that a module of Cython's exports, if it has the type that we call."""
    capsule = getattr(module, "__pyx_capi__", {}).get(name)
    return capsule if capsule is not None and _core.cupy_knows(capsule) else None

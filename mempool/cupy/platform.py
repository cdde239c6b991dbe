"""Interface of the pool to CuPy and the driver: current device and stream, and devices by index."""

from __future__ import annotations

from typing import Any, Protocol

from mempool import _core, cuda
from mempool.cuda import DRIVER
from mempool.errors import UsageError


class Platform(Protocol):
    """Devices by CuPy's index."""

    def check(self) -> None:
        """Raise `UsageError` if no device can be served."""

    def device(self, index: int) -> _core.Device:
        """Return the device of this index."""

    def current(self) -> tuple[Any, Any]:
        """Return functions for the index of the current device and the handle of the current stream.

        Each is a capsule of the C function, named by type as Cython does, or a Python callable.
        """


class Cuda:
    """CUDA devices that CuPy sees."""

    def __init__(self, driver: str = DRIVER, *, start: bool = True, memory: str = "plain") -> None:
        self._driver, self._start, self._memory = driver, start, memory

    def is_there(self) -> bool:
        """Return true if there is a driver; does not start the driver."""
        try:
            _core.CudaDevice(driver=self._driver)
        except RuntimeError:
            return False
        return True

    def check(self) -> None:
        """Detect problems now that would otherwise appear at the first array.

        Raises:
            UsageError: CuPy has no usable GPU; the message has the remedy.
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
            self.device(0)  # checks the kind of memory
        except RuntimeError as error:  # our own error, or CuPy's
            text = str(error) if isinstance(error, UsageError) else cuda.with_advice(error)
            raise UsageError(f"CuPy has no GPU to use here: {text}") from None

    def device(self, index: int) -> _core.CudaDevice:
        """Return the device of this index.

        Raises:
            UsageError: no such device, or the driver does not start; the message has the remedy.
        """
        return cuda.check(cuda.device(index, self._driver, self._memory))

    def current(self) -> tuple[Any, Any]:
        """Return CuPy's own C functions, or Python functions if this version exports none."""
        import cupy
        from cupy_backends.cuda import stream
        from cupy_backends.cuda.api import runtime

        return (
            _exported(runtime, "getDevice") or runtime.getDevice,
            _exported(stream, "get_current_stream_ptr") or (lambda: cupy.cuda.get_current_stream().ptr),
        )


def _exported(module: Any, name: str) -> Any:
    """Return a C function that a Cython module exports, if the type is supported; else None."""
    capsule = getattr(module, "__pyx_capi__", {}).get(name)
    return capsule if capsule is not None and _core.cupy_knows(capsule) else None

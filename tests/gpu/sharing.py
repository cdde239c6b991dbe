"""Check that two frameworks share memory: ``sharing.py torch rmm`` prints "holds"."""

from __future__ import annotations

import gc
import importlib
import sys
from typing import Any

from mempool import sharing

BYTES = 64 << 20
#: Further options of each adapter.
OPTIONS: dict[str, dict[str, Any]] = {"torch": {"device": "cuda:0", "backend": "pluggable"}}


def buffer(framework: str) -> tuple[int, Any]:
    """Return the address of a new buffer of ones, and its owner."""
    if framework == "torch":
        import torch

        tensor = torch.ones(BYTES, dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()
        return tensor.data_ptr(), tensor
    if framework == "cupy":
        import cupy

        array = cupy.ones(BYTES, cupy.uint8)
        cupy.cuda.Device().synchronize()
        return array.data.ptr, array
    if framework == "numba":
        import numpy
        from numba import cuda

        device_array = cuda.to_device(numpy.ones(BYTES, numpy.uint8))
        cuda.synchronize()
        return device_array.device_ctypes_pointer.value, device_array
    import rmm

    made = rmm.DeviceBuffer.to_device(b"\1" * BYTES)
    return made.ptr, made


def main(first: str, second: str) -> None:
    """Check that each framework reuses memory freed by the other, without a new reservation."""
    adapters = {name: importlib.import_module(f"mempool.{name}") for name in (first, second)}
    installed = adapters[first].install(background=False, **OPTIONS.get(first, {}))
    adapters[second].install(share=installed, background=False, **OPTIONS.get(second, {}))
    pool = sharing.pool_of(installed, 0)
    kept: list[Any] = []
    where, alive = buffer(first)
    kept.append(alive)
    del alive
    reserved = pool.core.stats()["reserved"]["current"]
    for framework in (second, first, second):
        kept.clear()
        gc.collect()
        address, alive = buffer(framework)
        kept.append(alive)
        del alive
        assert address == where, f"{framework} got other memory"
    assert pool.core.stats()["reserved"]["current"] == reserved
    print("holds")


if __name__ == "__main__":
    main(*sys.argv[1:])

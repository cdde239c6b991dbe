"""Checks of CuPy on a GPU with a pool, each in a separate process.

python cupy_checks.py NAME
"""

from __future__ import annotations

import sys

import cupy
import numpy as np
import pytest

import mempool.cupy

MIB = 1 << 20
GIB = 1 << 30


def _free_bytes() -> int:
    return int(cupy.cuda.runtime.memGetInfo()[0])


def _train(steps: int, side: int = 4096) -> float:
    """Run equal steps with temporary arrays; return the sum of their results."""
    values, total = cupy.arange(side * side, dtype=cupy.float32).reshape(side, side) % 7, 0.0
    for _ in range(steps):
        between = values * 2 + 1
        between = between @ between.T
        total += float(between.sum())
        del between
        mempool.cupy.installed().step()
    return total


def zero_bytes() -> str:
    """Arrays of zero bytes can be made, used and freed."""
    with mempool.cupy.install() as pool:
        for _ in range(100):
            empty = cupy.empty((0, 5))
            assert float((empty * 2).sum()) == 0.0
            assert cupy.concatenate([empty, cupy.ones((1, 5))]).shape == (1, 5)
            del empty
            pool.step()
        assert pool.report().to_dict()["foreign_frees"] == 0
    return "holds"


def streams() -> str:
    """Memory that the queued work of one stream still reads serves no request of another stream."""
    with mempool.cupy.install() as pool:
        first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        slow = cupy.RawKernel(_SLOW, "slow")
        for number in range(20):
            with first:
                source, copy = cupy.empty(16 * MIB, cupy.float32), cupy.empty(16 * MIB, cupy.float32)
                source.fill(number)
                slow((1,), (1,), (np.int64(20_000_000),))
                copy[:] = source
                del source
            with second:
                other = cupy.full(16 * MIB, -1, cupy.float32)
            cupy.cuda.runtime.deviceSynchronize()
            with first:
                assert bool((copy == number).all()), "what another stream read was overwritten"
                del copy
            with second:
                assert bool((other == -1).all()), "what this stream wrote was overwritten"
                del other
            pool.step()
    return "holds"


_SLOW = r"""
extern "C" __global__ void slow(long long cycles) {
    long long begin = clock64();
    while (clock64() - begin < cycles) {}
}
"""


def out_of_memory() -> str:
    """A request that exceeds the limit raises CuPy's own error, and the program continues."""
    with mempool.cupy.install(max_reserved=2 * GIB):
        before = _train(6)
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            cupy.empty(3 * GIB, cupy.uint8)
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            cupy.empty(1 << 50, cupy.uint8)
        assert _train(6) == before
    return "holds"


def two_devices() -> str:
    """Arrays are in the memory of their own device, and both devices give the same sums."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        return "skipped: there is one device"
    with mempool.cupy.install() as pool:
        sums = []
        for device in (0, 1, 0, 1):
            with cupy.cuda.Device(device):
                sums.append(_train(6))
                assert pool.total_bytes() > 0
                array = cupy.ones(MIB)
                assert array.device.id == array.data.device_id == device
        assert sums[:2] == sums[2:]
    return "holds"


def growing_gives_back() -> str:
    """A release returns a growing arena's memory to the device, and the arena serves again."""
    with mempool.cupy.install(memory="growing") as pool:
        before = _train(10)
        pool.wait(5)
        _train(4)
        held, free = pool.total_bytes(), _free_bytes()
        assert held >= 64 * MIB
        pool.release()
        assert pool.total_bytes() <= 0.1 * held
        assert _free_bytes() - free >= 0.8 * held, "the device has not got it back"
        assert _train(10) == before
    return "holds"


def managed_beyond_plain() -> str:
    """A managed pool serves requests that a smaller plain pool refuses, with the same results.

    Never more than half of what the card has free: managed memory beyond that would be taken from others.
    """
    size = min(2 * GIB, _free_bytes() // 12) // MIB * MIB
    with mempool.cupy.install(max_reserved=size), pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        _twice(size)
    with mempool.cupy.install(memory="managed", max_reserved=6 * size):
        sums = {_twice(size) for _ in range(6)}
    with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
        assert sums == {_twice(size)}
    return "holds"


def _twice(size: int) -> float:
    """Return the sum over two live arrays of ``size`` bytes each."""
    left = cupy.arange(size // 4, dtype=cupy.float32) % 5
    right = cupy.arange(size // 4, dtype=cupy.float32) % 3
    pool = mempool.cupy.installed()
    if pool is not None:
        pool.step()
    return float(left.sum()) + float(right.sum())


CHECKS = {
    check.__name__: check
    for check in (zero_bytes, streams, out_of_memory, two_devices, growing_gives_back, managed_beyond_plain)
}

if __name__ == "__main__":
    sys.stdout.write(CHECKS[sys.argv[1]]() + "\n")

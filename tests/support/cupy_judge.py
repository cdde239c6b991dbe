"""Comparison of CuPy's own memory pool, on a fake driver, with the model of that pool.

    python cupy_judge.py SEEDS

CuPy asks the CUDA runtime for the current device. Cython exports that function to CuPy's modules; the script
replaces it before they import it.
"""

from __future__ import annotations

import ctypes
import random
import sys
import warnings
from typing import Any

from allocator_models import CupyModel, Driver, Piece

MIB = 1 << 20
OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_signature = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
_kept: list[Any] = []


def answer(functions: dict[str, Any], name: str, value: int) -> None:
    """Replace an exported function without arguments by one that returns a number."""
    python = ctypes.pythonapi
    python.PyCapsule_GetName.restype = ctypes.c_char_p
    python.PyCapsule_GetName.argtypes = (ctypes.py_object,)
    python.PyCapsule_New.restype = ctypes.py_object
    python.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    signature = python.PyCapsule_GetName(functions[name])
    function = _signature(lambda _: value)
    _kept.extend([signature, function, functions[name]])
    functions[name] = python.PyCapsule_New(ctypes.cast(function, ctypes.c_void_p).value, signature, None)


class Held:
    """Owner of driver memory, which is freed with this object."""

    def __init__(self, driver: Driver, address: int) -> None:
        self.driver, self.address = driver, address

    def __del__(self) -> None:
        self.driver.free(self.address)


def judge(seed: int, *, limit: int, set_limit: int = 0) -> int:
    """Assert that model and CuPy agree on each request and on CuPy's statistics.

    Return the failed requests.
    """
    from cupy.cuda import memory, stream
    from cupy_backends.cuda.api import runtime

    theirs, ours = Driver(limit), Driver(set_limit or limit)

    def base(size: int) -> memory.MemoryPointer:
        address = theirs.malloc(size)
        if address is None:
            raise runtime.CUDARuntimeError(OUT_OF_MEMORY)
        return memory.MemoryPointer(memory.UnownedMemory(address, size, Held(theirs, address), 0), 0)

    pool = memory.SingleDeviceMemoryPool(base)
    pool.set_limit(size=set_limit)
    wanted = 0

    def choose(pieces: list[Piece]) -> Piece:
        return next(piece for piece in pieces if piece.address == wanted)

    model = CupyModel(ours, choose)
    chance = random.Random(seed)
    alive: list[Any] = []
    failures = 0
    for _ in range(400):
        on = chance.randrange(3)
        if alive and chance.random() < 0.45:
            given = alive.pop(chance.randrange(len(alive)))
            model.free(given.ptr, on)
            del given
        else:
            size = int(2 ** chance.uniform(0, 23)) if chance.random() < 0.8 else chance.choice([1, 512, 513])
            try:
                with stream.ExternalStream(1000 + on):
                    given = pool.malloc(size)
            except memory.OutOfMemoryError:
                assert model.allocate(size, on) is None, "the model has memory where CuPy has none"
                failures += 1
                continue
            wanted = given.ptr
            assert model.allocate(size, on) == (given.ptr, given.mem.size)
            alive.append(given)
            del given
        assert theirs.held == ours.held
        assert pool.total_bytes() == ours.reserved
        assert pool.used_bytes() == sum(piece.size for piece in model.pieces if not piece.free)
        assert pool.n_free_blocks() == sum(piece.free for piece in model.pieces)
    return failures


def main(seeds: int) -> None:
    from cupy_backends.cuda.api import runtime

    warnings.simplefilter("ignore", DeprecationWarning)  # of foreign streams: any would do
    answer(runtime.__pyx_capi__, "getDevice", 0)
    answer(runtime.__pyx_capi__, "getDeviceCount", 1)
    failures = [0, 0, 0]
    for seed in range(seeds):
        failures[0] += judge(seed, limit=1 << 40)
        failures[1] += judge(seed, limit=28 * MIB)
        failures[2] += judge(seed, limit=1 << 40, set_limit=28 * MIB)
    print(*failures)


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""Small library between PyTorch's allocator and the pool, compiled against the user's own torch."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from mempool import _core
from mempool.errors import UsageError
from mempool.torch.compiling import Source

SOURCE = Source(Path(__file__).with_name("companion.cpp"), ("c10",), "mempool_companion_install")


def install() -> None:
    """Replace PyTorch's CPU allocator by the pool.

    Raises:
        UsageError: the library cannot be built, or PyTorch refuses the allocator.
    """
    answer = _library().mempool_companion_install(*_core.torch_cpu_functions())
    if answer in (2, 3):
        raise UsageError("PyTorch's CPU allocator has been replaced by one that cannot be passed on to")
    if answer != 1:
        raise UsageError("PyTorch did not take the pool as its CPU allocator")


def uninstall() -> None:
    """Restore PyTorch's former CPU allocator, unless another library has replaced the pool's."""
    _library().mempool_companion_uninstall()


def refusal() -> int:
    """Return the address of the C function that throws `torch.OutOfMemoryError` with a given text.

    Raises:
        UsageError: the library cannot be built.
    """
    return ctypes.cast(_library().mempool_companion_refuse, ctypes.c_void_p).value or 0


@functools.cache
def _library() -> ctypes.CDLL:
    library = SOURCE.load()  # never unloaded: tensors are freed through this library until the process ends
    library.mempool_companion_install.argtypes = [ctypes.c_void_p] * 4
    return library

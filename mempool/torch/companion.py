"""The small library between PyTorch's allocator and the pool, compiled against the user's own torch."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from mempool import _core
from mempool.errors import UsageError
from mempool.torch.compiling import Source

SOURCE = Source(Path(__file__).with_name("companion.cpp"), ("c10",), "mempool_companion_install")


def install() -> None:
    """Make ours PyTorch's CPU allocator.

    Raises:
        UsageError: it cannot be built, or PyTorch does not take it.
    """
    answer = _library().mempool_companion_install(*_core.torch_cpu_functions())
    if answer in (2, 3):
        raise UsageError("PyTorch's CPU allocator has been replaced by one that cannot be passed on to")
    if answer != 1:
        raise UsageError("PyTorch did not take the pool as its CPU allocator")


def uninstall() -> None:
    """Make the former allocator PyTorch's again, unless somebody has replaced ours."""
    _library().mempool_companion_uninstall()


def refusal() -> int:
    """Address of the C function that throws `torch.OutOfMemoryError` with the text it is given.

    Raises:
        UsageError: the library cannot be built.
    """
    return ctypes.cast(_library().mempool_companion_refuse, ctypes.c_void_p).value or 0


@functools.cache
def _library() -> ctypes.CDLL:
    library = SOURCE.load()  # never unloaded: tensors are freed through it until the very end
    library.mempool_companion_install.argtypes = [ctypes.c_void_p] * 4
    return library

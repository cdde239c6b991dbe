"""CuPy's arrays in a pool.

    import mempool.cupy

    with mempool.cupy.install() as pool:
        for batch in batches:
            train(batch)
            pool.step()  # or nothing: the pool finds the iteration by itself
    print(pool.report())

The pool serves the arrays of all threads on every device; each device has a separate plan. Earlier arrays
keep their memory; arrays of the pool may outlive the pool, their thread, and the interpreter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.cuda import DRIVER
from mempool.cupy.platform import Cuda
from mempool.cupy.pool import CupyPool, slot
from mempool.settings import settings

if TYPE_CHECKING:
    from mempool.cupy.platform import Platform

__all__ = ["CupyPool", "install", "installed", "is_installed", "is_there", "uninstall"]


def __dir__() -> list[str]:
    return __all__


#: Options of `install` under `mempool run`, before the program uses the driver.
UNDER_RUN = {"start": False}


def install(*, start: bool = True, driver: str = DRIVER, **options: Any) -> CupyPool:
    """Serve CuPy's arrays of this process from a new pool, until the pool is closed.

    With the setting ``MEMPOOL=off``, the pool stays empty and CuPy unchanged.

    Args:
        start: check now that CuPy has a GPU, which starts the driver. False: the first array starts the
            driver, for programs that first set ``CUDA_VISIBLE_DEVICES`` or fork.
        driver: library of the CUDA driver.
        options: fields of `mempool.settings.Settings`, for each device; ``share``, a pool of a CUDA device
            whose memory to use there.

    Returns:
        The pool; leaving the ``with``, ``close`` and `uninstall` end the service. The report stays readable.

    Raises:
        UsageError: a pool is installed already, CuPy has no usable driver or GPU, the call is inside
            ``cupy.cuda.using_allocator``, or the options are invalid.
        ImportError: CuPy is not installed.
    """
    memory = settings(memory=options.get("memory")).memory or "plain"
    return _install(Cuda(driver, start=start, memory=memory), options)


def uninstall() -> None:
    """Close the installed pool and restore CuPy; arrays stay valid. Warns if no pool is installed."""
    slot.uninstall()


def installed() -> CupyPool | None:
    """Return the pool that serves CuPy, or None."""
    return slot.pool


def is_installed() -> bool:
    """Return true if a pool serves CuPy."""
    return slot.pool is not None


def is_there(driver: str = DRIVER) -> bool:
    """Return true if there is a CUDA driver; does not start the driver."""
    return Cuda(driver).is_there()


def _install(platform: Platform, options: dict[str, Any]) -> CupyPool:
    import cupy  # noqa: F401 - its distribution has another name for each CUDA, so its version is asked of the module

    return slot.install(lambda: CupyPool(platform=platform, **options), CupyPool.serve)

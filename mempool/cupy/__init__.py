"""CuPy's arrays in a pool.

    import mempool.cupy

    with mempool.cupy.install() as pool:
        for batch in batches:
            train(batch)
            pool.step()  # or nothing: the pool finds the iteration by itself
    print(pool.report())

Every array of every thread is covered, on every device, each of which has a plan of its own. Arrays made
before stay in the memory they have; arrays made inside may outlive the pool, their thread, and the
interpreter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.cuda import DRIVER
from mempool.cupy.platform import Cuda
from mempool.cupy.pool import CupyPool, place
from mempool.settings import settings

if TYPE_CHECKING:
    from mempool.cupy.platform import Platform
    from traces.recorders.arrays import ArrayRecorder

__all__ = ["CupyPool", "install", "installed", "is_installed", "is_there", "record_arrays", "uninstall"]

#: How `mempool run` installs it: nobody has asked for the driver yet.
UNDER_RUN = {"start": False}


def install(*, start: bool = True, driver: str = DRIVER, **options: Any) -> CupyPool:
    """Serve CuPy's arrays of this process from a new pool, until it is closed.

    With the setting ``MEMPOOL=off`` the pool stays empty and CuPy as it is.

    Args:
        start: ask now whether CuPy has a GPU, which starts the driver. Without it the first array does; a
            program that sets ``CUDA_VISIBLE_DEVICES`` or forks in between needs that.
        driver: the library of the CUDA driver.
        options: fields of `mempool.settings.Settings`, for each device; ``share``, a pool of a CUDA device
            whose memory to use there.

    Returns:
        The pool; leaving its ``with``, its ``close`` and `uninstall` all end it. Its report stays readable.

    Raises:
        UsageError: a pool is installed already, there is no driver or GPU that CuPy can use, it is called
            inside ``cupy.cuda.using_allocator``, or the options make no sense.
        ImportError: there is no CuPy.
    """
    memory = settings(memory=options.get("memory")).memory
    return _install(Cuda(driver, start=start, memory=memory), options)


def uninstall() -> None:
    """Close the installed pool: CuPy is as before, living arrays stay valid. Warns if there is none."""
    place.uninstall()


def installed() -> CupyPool | None:
    """The pool that serves CuPy, or None."""
    return place.pool


def is_installed() -> bool:
    """Whether a pool serves CuPy."""
    return place.pool is not None


def is_there(driver: str = DRIVER) -> bool:
    """Whether there is a CUDA driver; does not start it."""
    return Cuda(driver).is_there()


def record_arrays(*, frames: bool = False) -> ArrayRecorder:
    """A recorder of what arrays are read and written: see `mempool.accesses.record_arrays`.

    Args:
        frames: keep source lines.

    Returns:
        A context manager; its trace has all that the installed pool allocates and frees, if there is one.

    Raises:
        UsageError: the pool writes a trace file.
    """
    from mempool import accesses

    return accesses.record_arrays(installed(), frames=frames)


def _install(platform: Platform, options: dict[str, Any]) -> CupyPool:
    import cupy  # noqa: F401 - its distribution has another name for each CUDA, so its version is asked of the module

    return place.install(lambda: CupyPool(platform=platform, **options), CupyPool.serve)

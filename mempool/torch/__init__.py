"""Pools for PyTorch's tensors.

    import mempool.torch

    pool = mempool.torch.install()
    pool.watch(optimizer)  # or pool.step(), or nothing: the pool finds the iteration by itself
    for batch in batches:
        train(batch)
    print(pool.report())

With ``limit="12GiB"`` idle tensors are offloaded to host memory until their next use: see
`mempool.torch.eager`.

The pool serves all memory that PyTorch allocates on the chosen kind of device, in every thread. A tensor may
outlive the pool, its thread, and the interpreter. Details: `mempool.torch.cpu` and `mempool.torch.cuda`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from mempool.errors import UsageError
from mempool.torch.pool import TensorPool, slot

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    import torch

    from mempool.recording.torch.pool_recorder import AccessRecording
    from mempool.torch.estimate import Fit
    from mempool.torch.introspection.diagnosis import Diagnosis


__all__ = ["diagnose", "fit", "install", "installed", "is_installed", "record", "uninstall"]


def __dir__() -> list[str]:
    return __all__


def install(*, device: str | torch.device | None = None, **options: Any) -> TensorPool:
    """Serve the tensors of this process from a new pool, until the pool is closed.

    On CUDA the pool serves planned tensors in front of PyTorch's own allocator (see `mempool.torch.guest`),
    and can be installed at any time. With ``backend="pluggable"``, with an option that only this backend has
    (``limit``, ``share``, ``memory``, ``max_reserved``), or without a compiler, the pool replaces PyTorch's
    allocator. Such a pool must be installed before CUDA is initialised, and still serves after its close,
    without plans.

    The first use with a version of PyTorch compiles a small library, which takes some seconds and a C++
    compiler. Later processes reuse the library (see `mempool.torch.compiled_library`).

    Args:
        device: "cpu"; "cuda" for the CUDA device of the first tensor; "cuda:1" for that device. The default
            is "cuda" if PyTorch sees a GPU, else "cpu".
        options: as for `mempool.Pool`. ``limit`` offloads tensors of the calling thread and of its backward
            passes.

    Returns:
        The pool. The end of its ``with`` block, its ``close``, and `uninstall` each end the pool; the report
        stays readable.

    Raises:
        UsageError: a pool is installed already, the device does not exist, CUDA is initialised already, the
            options are invalid, or PyTorch or the compiler refuses.
        OSError, solvers.PlanError, traces.TraceError: the plan file cannot be read, or has no plan.
    """
    make = _maker(device, options)
    return slot.install(lambda: make(**options), lambda pool: pool.begin())


def uninstall() -> None:
    """Close the installed pool, and restore PyTorch; tensors stay valid. Warn if no pool is installed."""
    slot.uninstall()


def installed() -> TensorPool | None:
    """Return the pool that serves PyTorch, or None."""
    return slot.pool


def is_installed() -> bool:
    """Return true if a pool serves PyTorch."""
    return slot.pool is not None


def diagnose() -> Diagnosis:
    """Find settings and conditions that break a CUDA pool, with remedies, before training fails.

    The diagnosis touches neither the GPU nor any setting.

    Returns:
        The findings, ready for printing; ``ok`` is false if a finding prevents an installation.
    """
    from mempool.torch import cuda
    from mempool.torch.introspection import diagnosis

    return diagnosis.diagnose(serving=cuda.is_serving())


def fit(*args: Any, **options: Any) -> Fit:
    """Estimate the memory of a training step or an inference in advance: see `mempool.torch.estimate.fit`.

        print(mempool.torch.fit(model, torch.zeros(32, 3, 224, 224), limit="24GiB"))

    Neither a GPU nor memory is needed, and no pool is installed.
    """
    from mempool.torch import estimate

    return estimate.fit(*args, **options)


def record(
    path: str | os.PathLike[str] | None = None,
    model: torch.nn.Module | Iterable[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
) -> AccessRecording:
    """Record the reads and writes of operations, and all allocations and frees of the installed pool.

        with mempool.torch.record("run.trace", model, optimizer) as recording:
            for batch in batches:
                train(batch)
        recording.trace

    Without an installed pool, the trace has only the storages of tensors, without memory that kernels
    allocate internally. The trace has the operations of the calling thread and of its backward passes.

    Args:
        path: file of the trace; None writes no file.
        model: one or more modules, whose parameters and buffers are named at the start; other modules are
            named when called.
        optimizer: one or more optimizers; the steps of the last one end iterations. By default, the first
            optimizer that steps ends iterations.

    Raises:
        UsageError: the pool itself writes a trace.
    """
    from mempool.recording.torch.pool_recorder import AccessRecording

    return AccessRecording(path, model, optimizer)


def _maker(device: str | torch.device | None, options: dict[str, Any]) -> Callable[..., TensorPool]:
    """Return a factory of pools for this device."""
    from mempool.cuda import DRIVER
    from mempool.torch import cpu, cuda, guest

    chosen = (
        ("cuda" if cuda.is_there(options.get("driver", DRIVER)) else "cpu") if device is None else str(device)
    )
    kind, _, index = chosen.partition(":")
    if kind == "cpu" and index in ("", "0"):
        return cpu.CpuPool
    if kind == "cuda" and (index == "" or (index.isascii() and index.isdigit())):
        pool = guest.GuestPool if _is_guest(options) else cuda.CudaPool
        return functools.partial(pool, int(index) if index else None)
    raise UsageError(f"no device {device!r}; there are 'cpu', 'cuda' and 'cuda:1'")


def _is_guest(options: dict[str, Any]) -> bool:
    """Return true if the guest was requested or is possible; warn if it cannot be built."""
    from mempool.cuda import DRIVER
    from mempool.logs import log
    from mempool.settings import settings
    from mempool.torch import cuda, guest

    backend = settings(backend=options.get("backend")).backend
    if backend == "pluggable":
        return False
    other = cuda.is_serving() or options.get("driver", DRIVER) != DRIVER or guest.refused_options(options)
    if backend is None and other:
        return False
    if (reason := guest.obstacle()) is not None:
        log.warning("the pool replaces PyTorch's allocator (backend='pluggable'): %s", reason)
    return reason is None

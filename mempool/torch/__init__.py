"""PyTorch's tensors in a pool.

    import mempool.torch

    pool = mempool.torch.install()
    pool.watch(optimizer)  # or pool.step(), or nothing: the pool finds the iteration by itself
    for batch in batches:
        train(batch)
    print(pool.report())

Every tensor on the CPU whose memory PyTorch allocates is served, of every thread. Tensors made before are
freed as before; tensors made inside may outlive the pool, their thread, a fork, and the interpreter. Memory
that PyTorch does not allocate (`torch.from_numpy`, shared and pinned memory) is not touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool import _core
from mempool.errors import UsageError
from mempool.place import Place
from mempool.pool import Pool

if TYPE_CHECKING:
    import torch


def install(*, device: str | None = None, **options: Any) -> TensorPool:
    """Serve the tensors of this process from a new pool, until it is closed.

    The first time with a version of PyTorch a small library is compiled against it, which takes some seconds
    and a C++ compiler, and is kept for later (see `mempool.torch.companion`).

    Args:
        device: "cpu". By default that where there is no GPU.
        options: as for `mempool.Pool`.

    Returns:
        The pool; leaving its ``with``, its ``close`` and `uninstall` all end it. Its report stays readable.

    Raises:
        UsageError: a pool is installed already, there is no such device, the options make no sense, or the
            companion cannot be built.
    """
    _check_device(device)
    return _place.install(lambda: TensorPool(**options), TensorPool.serve)


def uninstall() -> None:
    """Close the installed pool: PyTorch is as before, living tensors stay valid. Warns if there is none."""
    _place.uninstall()


def installed() -> TensorPool | None:
    """The pool that serves PyTorch, or None."""
    return _place.pool


def is_installed() -> bool:
    """Whether a pool serves PyTorch."""
    return _place.pool is not None


class TensorPool(Pool):
    """A pool that leaves PyTorch when it is closed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"name": "torch", **options})

    def serve(self) -> None:
        """Take PyTorch's CPU tensors over."""
        from mempool.torch import companion

        companion.install()
        _core.torch_cpu_hook().serve(self.client, None if self._checking is None else self._checking.core)

    def watch(self, optimizer: torch.optim.Optimizer) -> Any:
        """End an iteration at every step of the optimizer.

        Returns:
            A handle, whose ``remove()`` ends it.
        """
        return optimizer.register_step_post_hook(lambda *_: self.step())

    def close(self) -> None:
        """Leave PyTorch and stop planning. Tensors stay valid."""
        _place.leave(self, self._stop_serving)
        super().close()

    def _stop_serving(self) -> None:
        from mempool.torch import companion

        if self._checking is not None:
            self._checking.end()
        if self.settings.mode != "off":
            _core.torch_cpu_hook().stop()
            companion.uninstall()


_place: Place[TensorPool] = Place("PyTorch", "mempool.torch")


def _check_device(device: str | None) -> None:
    import torch

    if device is None and torch.cuda.is_available():
        raise UsageError('CUDA tensors are not served yet; device="cpu" serves those on the CPU')
    if device not in (None, "cpu"):
        raise UsageError(f"no device {device!r}; there is 'cpu'")

"""Pool for PyTorch's tensors on the CPU.

PyTorch frees tensors from before the installation, and serves all tensors again once the pool is closed.
Memory from other sources than PyTorch's CPU allocator (`torch.from_numpy`, shared and pinned memory) is not
affected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool import _core
from mempool.torch import compiled_library
from mempool.torch.pool import TensorPool

if TYPE_CHECKING:
    import torch


class CpuPool(TensorPool):
    """A pool for tensors on the CPU, through ``c10::SetAllocator``."""

    def __init__(self, **options: Any) -> None:
        super().__init__("host", **options)

    @property
    def torch_device(self) -> torch.device:
        """The CPU."""
        import torch

        return torch.device("cpu")

    def serve(self) -> None:
        """Become PyTorch's CPU allocator.

        Raises:
            UsageError: the companion cannot be built, or PyTorch refuses the allocator.
        """
        compiled_library.install_cpu_allocator()
        _core.torch_cpu_hook().serve(
            self.client, None if self._fault_collector is None else self._fault_collector.core
        )

    def stop_serving(self) -> None:
        """Restore PyTorch's former CPU allocator."""
        if self._fault_collector is not None:
            self._fault_collector.end()
        if self.settings.mode != "off":
            _core.torch_cpu_hook().stop()
            compiled_library.uninstall_cpu_allocator()

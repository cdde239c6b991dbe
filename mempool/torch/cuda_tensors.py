"""Pool for PyTorch's tensors on one CUDA device, whatever the backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mempool.errors import UsageError
from mempool.settings import NEVER
from mempool.torch.introspection import statistics
from mempool.torch.pool import TensorPool

if TYPE_CHECKING:
    import torch

    from mempool import _core
    from mempool.reporting.report import Report


class CudaTensorPool(TensorPool):
    """A pool for tensors on one CUDA device, whose report stays after the pool is closed."""

    #: Streams never share addresses by default: PyTorch allows a program to wait for another stream's use of
    #: a tensor after the free, if only before the own stream's next allocation.
    wait_bytes = NEVER
    _cuda: _core.CudaDevice
    _final: Report | None = None  #: the report as of the closing

    @property
    def index(self) -> int | None:
        """The index of the device; None until the first tensor decides."""
        return self._cuda.index

    @property
    def torch_device(self) -> torch.device:
        """The device, without an index until the first tensor decides."""
        import torch

        return torch.device("cuda") if self.index is None else torch.device("cuda", self.index)

    def report(self) -> Report:
        """Return the report; for a closed pool, the report as of the closing."""
        return super().report() if self._final is None else self._final


def check_index(index: int | None) -> None:
    """Check that PyTorch sees the device of this index; None: the first tensor decides.

    Raises:
        UsageError: the device does not exist.
    """
    if index is not None and index >= (count := statistics.devices()) > 0:
        raise UsageError(f"no CUDA device {index}; PyTorch sees {count}")

"""Pool for PyTorch's tensors on one CUDA device, with either backend."""

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
    """A pool for tensors on one CUDA device, which keeps its report when closed."""

    #: By default, streams share no addresses: PyTorch permits a program to free a tensor before it waits for
    #: another stream's use, if the wait precedes the next allocation of the tensor's own stream.
    wait_bytes = NEVER
    _cuda: _core.CudaDevice
    _final: Report | None = None  #: the report at the close

    @property
    def index(self) -> int | None:
        """The index of the device; None before the first tensor."""
        return self._cuda.index

    @property
    def torch_device(self) -> torch.device:
        """The device, without an index before the first tensor."""
        import torch

        return torch.device("cuda") if self.index is None else torch.device("cuda", self.index)

    def report(self) -> Report:
        """Return the report; for a closed pool, the report at the close."""
        return super().report() if self._final is None else self._final


def check_index(index: int | None) -> None:
    """Check that PyTorch sees device number `index`, unless None.

    Raises:
        UsageError: the device does not exist.
    """
    if index is not None and index >= (count := statistics.devices()) > 0:
        raise UsageError(f"no CUDA device {index}; PyTorch sees {count}")

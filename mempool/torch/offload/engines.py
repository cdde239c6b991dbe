"""Choice of the copy engine for a device, and of the link to measure on this machine.

PyTorch is imported only if there is a GPU.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from mempool.torch.offload.engine import Engine
    from solvers.swap import Link


def create_engine(device: torch.device, host_bytes: int) -> Engine:
    """Return a copy engine between a device and the host, with at most `host_bytes` of host memory."""
    if device.type == "cuda":
        from mempool.torch.offload.cuda_engine import CudaEngine

        return CudaEngine(device, host_bytes)
    from mempool.torch.offload.host_engine import HostEngine

    return HostEngine(host_bytes)


def measure_this_machine() -> tuple[Link, str]:
    """Return the link to this machine's GPU (without a GPU, from memory to memory), and a description."""
    from mempool import _core

    if _core.cuda_devices() and importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            from mempool.torch.offload.cuda_engine import CudaEngine

            link = _of(CudaEngine(torch.device("cuda", 0), 1 << 28))
            return link, f"to {torch.cuda.get_device_name(0)} and back"
    from mempool.torch.offload.host_engine import HostEngine

    return _of(HostEngine(1)), "from memory to memory, as PyTorch sees no GPU"


def _of(engine: Engine) -> Link:
    try:
        return engine.link()
    finally:
        engine.close()

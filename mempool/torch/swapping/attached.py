"""Swapping for a pool: from when it serves PyTorch to when it is closed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from mempool.torch.swapping.host_memory import default_host_limit
from mempool.torch.swapping.swapper import Swapper

if TYPE_CHECKING:
    import torch

    from mempool.torch import TensorPool
    from mempool.torch.swapping.engine import Engine


class Swapping:
    """Keeps what a pool serves within a limit, in the thread that makes this and its backwards.

    Attributes:
        swapper: what does it.
    """

    def __init__(self, pool: TensorPool, device: torch.device, limit_bytes: int) -> None:
        """Begin."""
        host_bytes = pool.settings.host_limit or default_host_limit()
        self._engine = engine_for(device, host_bytes)
        self.swapper = Swapper(
            self._engine,
            device,
            limit_bytes,
            alignment=pool.device.alignment,
            host_bytes=host_bytes,
            client=pool.client,
            ended=pool.mark_found_step,
            anew=pool.begin_anew,
        )
        self._pid = os.getpid()
        self._ended = False
        self.swapper.__enter__()

    def begin(self) -> None:
        """The program says that an iteration begins; what came before it is none."""
        self.swapper.begin()

    def marked(self) -> None:
        """The program will say where iterations end; steps of optimizers no longer do."""
        self.swapper.marked = True

    def mark(self) -> None:
        """The program says that an iteration has ended."""
        self.swapper.marked = True
        self.swapper.step()

    def values(self) -> dict[str, Any]:
        """What the report says, with sizes in bytes."""
        return {**self.swapper.values(), "host_bytes": self._engine.host_bytes}

    def end(self) -> None:
        """Have everything here again, and leave PyTorch; in the thread that works with tensors."""
        if self._ended or self._pid != os.getpid():
            return  # a forked child goes on as it is: what is away comes when it is asked for
        self._ended = True
        if self.swapper in _get_current_dispatch_mode_stack():
            _take_out(self.swapper)
        else:  # this is another thread
            self.swapper.end()
        self._engine.close()


def engine_for(device: torch.device, host_bytes: int) -> Engine:
    """What copies between a device and the host, where at most so many bytes are taken."""
    if device.type == "cuda":
        from mempool.torch.swapping.cuda_engine import CudaEngine

        return CudaEngine(device, host_bytes)
    from mempool.torch.swapping.host_engine import HostEngine

    return HostEngine(host_bytes)


def _take_out(mode: Any) -> None:
    """Exit a mode, whatever was entered after it."""
    above = []
    while _get_current_dispatch_mode_stack()[-1] is not mode:
        above.append(_pop_mode())
    try:
        mode.__exit__(None, None, None)
    finally:
        for other in reversed(above):
            _push_mode(other)

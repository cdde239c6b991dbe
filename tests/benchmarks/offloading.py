"""Baselines that offload activations by hooks on saved tensors, on CUDA and on the CPU.

On the CPU the host's memory is taken past the pool, which stands for the device; what comes back is a copy.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from mempool import _core

if TYPE_CHECKING:
    from collections.abc import Callable

#: Size in bytes of the smallest offloaded tensor, as in torchtune.
LEAST_BYTES = 1024


def saved_on_host(device: str) -> saved_tensors_hooks:
    """Return PyTorch's ``save_on_cpu``, which waits for its copies."""
    if device == "cuda":
        return save_on_cpu(pin_memory=True)

    def leave(tensor: torch.Tensor) -> torch.Tensor:
        with _core.Bypass():
            return tensor.detach().clone()

    return saved_tensors_hooks(leave, lambda copy: copy.clone())  # on the CPU `save_on_cpu` copies nothing


class Copier(Protocol):
    """Copies tensors one after the other, in parallel with the computation."""

    def offload(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
        """Start a copy to the host; return the copy and a function that waits for it."""

    def reload(self, copy: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a copy on the device, complete for operations that are queued later."""


class Stream:
    """Copies tensors on one CUDA stream, into page-locked memory."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def offload(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
        """Start a copy to the host."""
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        compute = torch.cuda.current_stream()
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            copy.copy_(tensor, non_blocking=True)
        copied = self._stream.record_event()
        return copy, lambda: torch.cuda.current_stream().wait_event(copied)

    def reload(self, copy: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a copy on the device."""
        tensor = torch.empty_like(copy, device=device, pin_memory=False)
        compute = torch.cuda.current_stream()
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            tensor.copy_(copy, non_blocking=True)
        compute.wait_stream(self._stream)
        return tensor


class Thread:
    """Copies tensors in one thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)

    def offload(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
        """Start a copy to memory outside the pool."""
        with _core.Bypass():
            copy = torch.empty_like(tensor)
        return copy, self._thread.submit(copy.copy_, tensor).result

    def reload(self, copy: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a copy in the pool."""
        tensor = torch.empty_like(copy, device=device)
        self._thread.submit(tensor.copy_, copy).result()
        return tensor


@dataclass
class Saved:
    """A tensor that autograd saved, kept on the device at first (``here``), and its copy on the host."""

    here: torch.Tensor | None
    copy: torch.Tensor
    wait: Callable[[], object]
    device: torch.device


class LastKept(saved_tensors_hooks):
    """Offload activations when autograd saves them, and keep the last few on the device as well.

    The rule of torchtune's ``OffloadActivations`` with a stream: parameters and small tensors stay, what
    is still there is used, the rest comes back when it is asked for, one after the other.
    """

    def __init__(self, copier: Copier, kept: int = 5) -> None:
        self._copier = copier
        self._most = kept
        self._kept: list[Saved] = []
        super().__init__(self._offload, self._reload)

    def _offload(self, tensor: torch.Tensor) -> Saved | torch.Tensor:
        if isinstance(tensor, torch.nn.Parameter) or tensor.nbytes < LEAST_BYTES:
            return tensor
        while len(self._kept) >= self._most:
            first = self._kept.pop(0)
            first.wait()
            first.here = None
        with torch.no_grad():
            saved = Saved(tensor, *self._copier.offload(tensor.detach()), tensor.device)
        self._kept.append(saved)
        return saved

    def _reload(self, saved: Saved | torch.Tensor) -> torch.Tensor:
        if not isinstance(saved, Saved):
            return saved
        if saved.here is not None:
            return saved.here
        return self._copier.reload(saved.copy, saved.device)

    def end_of_step(self) -> None:
        """Release the tensors kept for the step."""
        for saved in self._kept:
            saved.wait()
        self._kept.clear()

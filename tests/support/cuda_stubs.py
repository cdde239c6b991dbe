"""Stand-ins for CUDA functions of `torch._C` that CPU builds of PyTorch lack."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mempool import _core
from mempool.torch.introspection import statistics

TOTAL_BYTES = 1 << 36
NAMES = tuple(statistics.FUNCTIONS)


def pretend(monkeypatch: pytest.MonkeyPatch, devices: int = 1) -> list[str]:
    """Make PyTorch see GPUs with a pluggable allocator; collect the names of refused functions."""
    refused: list[str] = []

    def refusing(name: str) -> Any:
        def refuse(*_args: Any) -> None:
            refused.append(name)
            raise RuntimeError(f"CUDAPluggableAllocator does not yet support {name}")

        return refuse

    for name in NAMES:
        monkeypatch.setattr(torch._C, name, refusing(name), raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: True)
    for module in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(module, "is_initialized", lambda: True)
        monkeypatch.setattr(module, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=TOTAL_BYTES)
    )
    return refused


def gpu(page: int = 1 << 16) -> _core.SimulatedDevice:
    return _core.SimulatedDevice(capacity=1 << 40, page=page, shared_segment=2 << 20, large=1 << 20)

"""Measure workspaces: bytes that an operation allocates beyond arguments and results.

Most workspaces live as long as the operation. cuBLAS keeps the workspaces of matrix products.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mempool import _core

if TYPE_CHECKING:
    from collections.abc import Callable

#: Flags of `ProfilerConfig`: no shapes; memory; no stacks, no FLOPS, no modules.
_MEMORY_ONLY = (False, True, False, False, False)


def watched(call: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """Return the result of a call and the peak bytes beyond those still allocated when the call ends."""
    return _on_cuda(call, device) if device.type == "cuda" else _on_cpu(call)


@functools.cache
def of_handle(device: torch.device) -> int:
    """Measure the bytes that cuBLAS keeps per thread and stream with matrix products; 0 on a CPU.

    The size depends on the GPU and on ``CUBLAS_WORKSPACE_CONFIG``, hence the measurement. Existing workspaces
    are freed first; cuBLAS allocates them again when needed.
    """
    if device.type != "cuda":
        return 0
    with _disable_current_modes(), torch.no_grad():
        torch._C._cuda_clearCublasWorkspaces()
        matrix = torch.ones(32, 32, device=device)
        before = torch.cuda.memory_allocated(device)
        torch.mm(matrix, matrix)
        return int(torch.cuda.memory_allocated(device) - before)


def _on_cpu(call: Callable[[], Any]) -> tuple[Any, int]:
    """Measure with the allocations that PyTorch's own allocator reports to a profiler, bypassing any pool."""
    with_memory = torch.autograd.ProfilerConfig(
        torch.autograd.ProfilerState.CPU, *_MEMORY_ONLY, torch._C._profiler._ExperimentalConfig()
    )
    with _core.Bypass():
        torch.autograd._enable_profiler_legacy(with_memory)
        try:
            result = call()
        finally:
            events = itertools.chain(*torch.autograd._disable_profiler_legacy())
    sizes = [event.cpu_memory_usage() for event in events if event.kind() == "memory_alloc"]
    held = [0, *itertools.accumulate(sizes)]
    return result, max(held) - max(held[-1], 0)


def _on_cuda(call: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    return result, torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)

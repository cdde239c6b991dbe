"""Memory that a GPU needs outside all operations, as named parts, each with formula and source.

`cuda_context` is the driver's context: code, stacks and queues of the process. `kernels` are the kernels of
PyTorch, cuBLAS and cuDNN, loaded on first use. `cublas_workspace` is the workspace of cuBLAS in each thread
that multiplies matrices; `cudnn_workspace` is the excess of convolutions with their workspaces over the peak.

Losses of allocators by rounding and fragmentation are no margin, since the simulators report them.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from mempool.hardware.gpu_memory import KERNEL_BYTES, context_bytes
from traces.trace import EventType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces import Trace

MIB = 1 << 20
#: Parts that PyTorch takes from its own allocator, so that `torch.cuda.max_memory_allocated` counts them.
IN_ALLOCATOR = ("cublas_workspace", "cudnn_workspace")

_PRODUCTS = re.compile(r"^aten::_?(scaled_)?(mm|addmm|bmm|baddbmm|addbmm|matmul|linear)\b")
_CONVOLUTIONS = re.compile(r"^aten::(cudnn_|_)?convolution")


def margins(trace: Trace, device: str = "cuda", *, capability: tuple[int, int] = (8, 0)) -> dict[str, int]:
    """Return the bytes that a GPU needs in addition to a fake run's trace, by name, without zeros.

    Args:
        trace: trace of the run, with names of operations and marks of phases.
        device: "cuda" or "cpu"; the CPU adds nothing.
        capability: the compute capability.
    """
    if device == "cpu":
        return {}
    found = {
        "cuda_context": context_bytes(capability),
        "kernels": KERNEL_BYTES,
        "cublas_workspace": _of_cublas(trace, capability),
        "cudnn_workspace": _of_cudnn(trace),
    }
    return {name: bytes_ for name, bytes_ in found.items() if bytes_}


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    """Return the bytes of workspace that PyTorch allocates for cuBLAS per handle and stream.

    `parseChosenWorkspaceSize` in `ATen/cuda/CublasHandlePool.cpp`: ":4096:2:16:8", that is 8,519,680 bytes;
    32 MiB on Hopper; or the value of the variable CUBLAS_WORKSPACE_CONFIG, as sizes in KiB and counts.
    """
    pairs = re.findall(r":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return sum(int(size) * int(count) for size, count in pairs) << 10
    return 32 * MIB if capability[0] == 9 else (2 * 4096 + 8 * 16) << 10


def _of_cublas(trace: Trace, capability: tuple[int, int]) -> int:
    """Return the cuBLAS workspaces in bytes: one for the program's thread, one for autograd's thread.

    Each thread has a handle; autograd's thread counts only with a backward pass.
    """
    if not len(_rows(trace, _PRODUCTS)):
        return 0
    marks = {trace.names[n] for n in trace.operation[trace.kind == EventType.MARK] if n >= 0}
    return (1 + ("backward" in marks)) * cublas_workspace_bytes(capability)


def _of_cudnn(trace: Trace) -> int:
    """Return the excess over the peak if each convolution has a workspace of the size of its operands.

    cuDNN's kernels on tensor cores need channels last, and convert other layouts in the workspace: copies of
    input, weight and output. Winograd and FFT kernels may need more, and a search with
    ``torch.backends.cudnn.benchmark`` much more (pytorch#49207).
    """
    load, rows = trace.load(), _rows(trace, _CONVOLUTIONS)
    if not len(rows):
        return 0
    rows = rows[trace.of_buffers[rows]]
    size = np.zeros(int(trace.buffer.max(initial=-1)) + 1, np.int64)
    allocs = trace.kind == EventType.ALLOC
    size[trace.buffer[allocs]] = trace.size[allocs]
    # Events of one operation have equal times.
    call = np.unique(np.stack([trace.time_ns[rows], trace.operation[rows]]), axis=1, return_inverse=True)[1]
    call = call.reshape(-1)
    pairs = np.unique(np.stack([call, trace.buffer[rows]]), axis=1)
    touched = np.bincount(pairs[0], weights=size[pairs[1]]).astype(np.int64)
    before = np.zeros(len(touched), np.int64)
    np.maximum.at(before, call, load[rows])
    return max(0, int((before + touched).max(initial=0)) - int(load.max(initial=0)))


def _rows(trace: Trace, pattern: re.Pattern[str]) -> NDArray[Any]:
    """Return the indices of the events of operations whose name matches."""
    known = np.array([pattern.match(name) is not None for name in trace.names] or [False])
    named = (trace.operation >= 0) & (trace.kind != EventType.MARK)
    found: NDArray[Any] = np.flatnonzero(named & known[np.where(named, trace.operation, 0)])
    return found

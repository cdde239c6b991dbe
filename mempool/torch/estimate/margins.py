"""Memory that a GPU needs outside all operations, as named parts, each with formula and source.

Some parts are memory of PyTorch's allocator, which `torch.cuda.max_memory_allocated` counts; the driver and
libraries take the other parts from the device. Losses of allocators by rounding and fragmentation are no
margin, since simulators report them. Users can pass their own measurements.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from mempool.errors import UsageError
from mempool.hardware.gpu_memory import KERNEL_BYTES, context_bytes
from traces.trace import EventType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from traces import Trace

MIB = 1 << 20
#: Names and descriptions of the parts.
PARTS = {
    "cuda_context": "the driver's context: code, stacks and queues of the process on the device",
    "kernels": "kernels of PyTorch, cuBLAS and cuDNN, loaded when first used",
    "cublas_workspace": "scratch memory of cuBLAS, for each thread that multiplies matrices",
    "cudnn_workspace": "by how much convolutions with their scratch memory exceed the peak",
    "other_models": "memory outside the step, such as an average of the weights; only as given",
}
IN_ALLOCATOR = ("cublas_workspace", "cudnn_workspace", "other_models")

_PRODUCTS = re.compile(r"^aten::_?(scaled_)?(mm|addmm|bmm|baddbmm|addbmm|matmul|linear)\b")
_CONVOLUTIONS = re.compile(r"^aten::(cudnn_|_)?convolution")


def margins(
    trace: Trace,
    device: str = "cuda",
    *,
    capability: tuple[int, int] = (8, 0),
    margin: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Return the bytes that a GPU needs in addition to a fake run's trace, by names of `PARTS`.

    Args:
        trace: trace of the run, with names of operations and marks of phases.
        device: "cuda" or "cpu"; the CPU adds nothing.
        capability: the compute capability.
        margin: the user's figures in bytes by name, such as ``{"cuda_context": 0}``.

    Returns:
        The parts that are not zero or given in ``margin``.

    Raises:
        UsageError: a name in ``margin`` is unknown, or a size is below zero.
    """
    given = _checked(margin)
    if device.partition(":")[0] == "cpu":
        return given
    found = {
        "cuda_context": context_bytes(capability),
        "kernels": KERNEL_BYTES,
        "cublas_workspace": _of_cublas(trace, capability),
        "cudnn_workspace": _of_cudnn(trace),
    }
    return {name: bytes_ for name, bytes_ in (found | given).items() if bytes_ or name in given}


def parse_margins(texts: list[str]) -> dict[str, int]:
    """Parse margins in the form of a command line: "cuda_context=300MiB".

    Raises:
        UsageError: a text cannot be parsed.
    """
    from mempool.units import parse_memory

    pairs = [text.partition("=") for text in texts]
    if wrong := next((text for text, (_, equals, _) in zip(texts, pairs, strict=True) if not equals), None):
        raise UsageError(f"{wrong!r} is no margin: say NAME=SIZE, such as cuda_context=300MiB")
    _checked(dict.fromkeys((name for name, _, _ in pairs), 0))
    return _checked({name: parse_memory(size) for name, _, size in pairs})


def _checked(margin: Mapping[str, int] | None) -> dict[str, int]:
    for name, size in (margin or {}).items():
        if name not in PARTS:
            raise UsageError(f"no margin {name!r}; there are {', '.join(PARTS)}")
        if size < 0:
            raise UsageError(f"the margin {name!r} is {size} bytes: it cannot be below zero")
    return dict(margin or {})


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
    load = trace.load()
    rows = _rows(trace, _CONVOLUTIONS)
    return max(0, _highest(trace, rows, load) - int(load.max(initial=0))) if len(rows) else 0


def _highest(trace: Trace, rows: NDArray[Any], load: NDArray[np.int64]) -> int:
    """Return the largest load during some operations, with the operation's own buffers counted twice.

    Args:
        trace: the trace.
        rows: indices of the operations' events; events of one operation have equal times.
        load: bytes alive after each event.
    """
    size = np.zeros(int(trace.buffer.max(initial=-1)) + 1, np.int64)
    allocs = trace.kind == EventType.ALLOC
    size[trace.buffer[allocs]] = trace.size[allocs]
    rows = rows[trace.of_buffers[rows]]
    call = np.unique(np.stack([trace.time_ns[rows], trace.operation[rows]]), axis=1, return_inverse=True)[1]
    call = call.reshape(-1)
    pairs = np.unique(np.stack([call, trace.buffer[rows]]), axis=1)
    touched = np.bincount(pairs[0], weights=size[pairs[1]])
    before = np.zeros(len(touched), np.int64)
    np.maximum.at(before, call, load[rows])
    return int((before + touched.astype(np.int64)).max(initial=0))


def _rows(trace: Trace, pattern: re.Pattern[str]) -> NDArray[Any]:
    """Return the indices of the events of operations whose name matches."""
    known = np.array([pattern.match(name) is not None for name in trace.names] or [False])
    named = (trace.operation >= 0) & (trace.kind != EventType.MARK)
    found: NDArray[Any] = np.flatnonzero(named & known[np.where(named, trace.operation, 0)])
    return found

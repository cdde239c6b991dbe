"""Modelled or measured costs: seconds of operations, copies and steps, and workspaces of operations."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from mempool import _core
from mempool.hardware.gpu_throughput import rates_of
from mempool.hardware.roofline import Roofline
from mempool.torch.compiled import ops
from mempool.torch.compiled.options import TUNABLES
from mempool.torch.compiled.runtime import RUNTIME, TransferCounters
from mempool.torch.offload.link import fit_line
from solvers.rewriting.copy_overhead import CopyOverhead

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    from mempool.hardware.gpu_throughput import Rates


#: Namespaces whose operators have only the effects that their schemas and tags declare. An operator of a
#: third party may draw random numbers, count its calls or communicate.
_PYTORCHS_OWN = ("aten", "prims")


def is_pytorchs_own(node: fx.Node) -> bool:
    """Return true for PyTorch's own operators, which may be run again for a measurement."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _PYTORCHS_OWN


def traced_values(node_arguments: Any) -> Any:
    """Replace each node among arguments by its traced value (``meta["val"]``)."""
    return torch.fx.map_arg(node_arguments, lambda node: node.meta.get("val"))


def roofline_seconds(rates: Rates | None = None) -> Callable[[fx.Node], float]:
    """Return a function for the roofline seconds of a node: the longer of arithmetic and memory time."""
    clock = Roofline(rates or rates_of())

    def seconds(node: fx.Node) -> float:
        if not isinstance(node.target, torch._ops.OpOverload):
            return 0.0
        args, kwargs, result = _traced(traced_values((node.args, node.kwargs, node.meta.get("val"))))
        return 1e-9 * clock.nanoseconds(node.target, args, kwargs, result)

    return seconds


def _traced(values: Any) -> Any:
    """Replace symbolic sizes by plain numbers; comparing symbols would create guards."""
    storages: dict[int, torch.UntypedStorage] = {}

    def plain(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not _is_symbolic(value):
            return hint(value)
        symbolic = value.untyped_storage()
        size = hint(symbolic.nbytes())
        storage = storages.setdefault(symbolic._cdata, torch.UntypedStorage(size, device="meta"))
        form = (
            hint(value.storage_offset()),
            *(tuple(map(hint, numbers)) for numbers in (value.shape, value.stride())),
        )
        return torch.empty(0, dtype=value.dtype, device="meta").set_(storage, *form)

    with _disable_current_modes():
        return tree_map(plain, values)


def _is_symbolic(tensor: torch.Tensor) -> bool:
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return any(isinstance(number, torch.SymInt) for number in numbers)


def hint(value: Any) -> Any:
    """Return the hint (value during tracing) of a symbolic number; return any other value unchanged."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    return value


@dataclass
class MeasuredCosts:
    """Seconds and workspaces of operations, measured on this machine once per distinct call.

    Only PyTorch's own operators are run: others may count their calls or wait for other processes.

    An operation runs on tensors of the same shapes, strides and types as the arguments. The tensors hold
    small random numbers; indices are 0. After one warm-up run, the median of ``runs`` runs counts.

    Attributes:
        device: the device to run on.
        fallback: the estimate for operations that cannot be run.
        runs: number of timed runs per distinct call.
        known: measured seconds by call.
        workspaces: measured workspace bytes by call.
    """

    device: torch.device | str = "cpu"
    fallback: Callable[[fx.Node], float] = field(default_factory=roofline_seconds)
    runs: int = TUNABLES.timed_runs
    known: dict[Any, float] = field(default_factory=dict)
    workspaces: dict[Any, int] = field(default_factory=dict)

    def __call__(self, node: fx.Node) -> float:
        """Return the seconds of a node."""
        return self._costs_of(node)[0]

    def workspace(self, node: fx.Node) -> int:
        """Return the workspace bytes of a running node; 0 if the node cannot be run.

        Operators that only a compiler inserts (namespace ``prims``) count 0 bytes, since such an operator,
        run alone, is a program of several operations.
        """
        return 0 if getattr(node.target, "namespace", None) == "prims" else self._costs_of(node)[1]

    def _costs_of(self, node: fx.Node) -> tuple[float, int]:
        if not is_pytorchs_own(node):
            return self.fallback(node), 0
        args, kwargs = tree_map(hint, traced_values((node.args, node.kwargs)))
        key = node.target, str(tree_map(_signature, (args, kwargs)))
        if key not in self.known:
            self.workspaces[key] = 0
            self.known[key] = self._measure(node, args, kwargs, key)
        return self.known[key], self.workspaces[key]

    def _measure(self, node: fx.Node, args: Any, kwargs: Any, key: Any) -> float:
        state = torch.get_rng_state()
        try:
            args, kwargs = tree_map(self._real_tensor, (args, kwargs))
            with torch.no_grad():
                once = functools.partial(self._timed_call, node.target, args, kwargs)
                _, self.workspaces[key] = measure_workspace(
                    lambda: node.target(*args, **kwargs), torch.device(self.device)
                )
                return statistics.median(once() for _ in range(self.runs))
        except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError):
            return self.fallback(node)
        finally:
            torch.set_rng_state(state)

    def _timed_call(self, operation: Any, args: Any, kwargs: Any) -> float:
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)
            runs: deque[Any] = deque()
            _timed_on_gpu(lambda _: operation(*args, **kwargs), runs)([])
            torch.cuda.synchronize(self.device)
            return _seconds(runs[0]) or 0.0
        begin = time.perf_counter()
        result = operation(*args, **kwargs)
        spent = time.perf_counter() - begin
        del result
        return spent

    def _real_tensor(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device(self.device)
        if not isinstance(value, torch.Tensor):
            return value
        shape, stride = tuple(map(hint, value.shape)), tuple(map(hint, value.stride()))
        real = torch.empty_strided(shape, stride, dtype=value.dtype, device=self.device)
        if value.dtype.is_floating_point:
            return real.uniform_(0.1, 1.0)
        return real.zero_()


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(map(hint, value.shape)), tuple(map(hint, value.stride())), value.dtype
    return value


def fused_seconds(seconds: Callable[[fx.Node], float]) -> Callable[[fx.Node], float]:
    """Convert stand-alone times of operations into their times inside fused kernels.

    A fused kernel writes to memory only graph outputs, and inputs of operations that cannot be fused, such as
    a matrix product.
    """
    from torch._functorch.partitioners import get_default_op_list

    known = get_default_op_list()

    @functools.cache
    def is_fused(node: fx.Node) -> bool:
        if node.op == "output" or node.target is operator.getitem:
            return node.target is operator.getitem and all(map(is_fused, node.users))
        if not isinstance(node.target, torch._ops.OpOverload):
            return False
        pointwise = torch.Tag.pointwise in node.target.tags
        detached = node.target is torch.ops.aten.detach.default
        return pointwise or detached or known.is_fusible(node) or known.is_view(node)

    def seconds_in_kernel(node: fx.Node) -> float:
        inside = is_fused(node) and bool(node.users) and all(map(is_fused, node.users))
        return TUNABLES.fused_share * seconds(node) if inside else seconds(node)

    return seconds_in_kernel


@functools.cache
def copy_calls(device: torch.device, host_limit: int = 0) -> CopyOverhead:
    """Measure the seconds that copies cost the program on a device; return the best of several rounds.

    On a GPU, requests cost nothing, since the host runs ahead.
    """
    if device.type == "cuda":
        return CopyOverhead()
    copier = RUNTIME.engine(device, host_limit).sync_copier
    sizes = (
        TUNABLES.small_copy_bytes
        if copier is None or copier.sync_bytes < TUNABLES.all_copy_bytes[-1]
        else TUNABLES.all_copy_bytes
    )
    counted = RUNTIME.counters
    try:
        async_seconds = _best_copy_seconds(device, TUNABLES.small_copy_bytes[0], host_limit, _copy_async)
        times = [_best_copy_seconds(device, size, host_limit, _copy_sync) for size in sizes] if copier else []
    finally:
        RUNTIME.counters = counted
    if copier is None:
        return CopyOverhead(async_seconds)
    return CopyOverhead(async_seconds, copier.sync_bytes, *fit_line(sizes, times))


def _best_copy_seconds(
    device: torch.device,
    size: int,
    host_limit: int,
    copy: Callable[[list[torch.Tensor], int], None],
) -> float:
    """Return the seconds of one copy, offload or reload, without the seconds spent waiting for transfers."""
    values = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(TUNABLES.copies)]
    best = math.inf
    for _ in range(TUNABLES.copy_rounds):
        RUNTIME.counters = TransferCounters()
        begin = time.perf_counter()
        copy(values, host_limit)
        spent = time.perf_counter() - begin
        best = min(best, (spent - RUNTIME.counters.wait_seconds) / (2 * TUNABLES.copies))
    return best


def _copy_async(values: list[torch.Tensor], host_limit: int) -> None:
    out = [ops.offload(value, host_limit) for value in values]
    away = [ops.offload_wait(ticket, value) for ticket, value in zip(out, values, strict=True)]
    coming = [ops.reload(ticket, *_layout(value)) for ticket, value in zip(away, values, strict=True)]
    for ticket, value in zip(coming, values, strict=True):
        ops.reload_wait(ticket, *_layout(value))


def _copy_sync(values: list[torch.Tensor], host_limit: int) -> None:
    away = [ops.offload_sync(value, host_limit) for value in values]
    for ticket, value in zip(away, values, strict=True):
        ops.reload_sync(ticket, *_layout(value))


def _layout(value: torch.Tensor) -> tuple[object, ...]:
    return value.shape, value.stride(), value.dtype, value.device


#: Flags of `ProfilerConfig`: no shapes; memory; no stacks, no FLOPS, no modules.
_MEMORY_ONLY = (False, True, False, False, False)


def measure_workspace(call: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """Return the result of a call, and the call's peak bytes in excess of the bytes allocated at its end."""
    return _cuda_workspace(call, device) if device.type == "cuda" else _cpu_workspace(call)


@functools.cache
def cublas_workspace_bytes(device: torch.device) -> int:
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


def _cpu_workspace(call: Callable[[], Any]) -> tuple[Any, int]:
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


def _cuda_workspace(call: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    torch.cuda.reset_peak_memory_stats(device)
    result = call()
    return result, torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)


class StepTimer:
    """Run times of a step's graphs; on a GPU, from events on the current stream, without waiting."""

    def __init__(self) -> None:
        """Start without runs."""
        latest = TUNABLES.timed_steps
        self._runs: dict[bool, deque[Any]] = {False: deque(maxlen=latest), True: deque(maxlen=latest)}

    def wrap(self, run: Callable[..., Any], inputs: Sequence[Any], *, backward: bool) -> Callable[..., Any]:
        """Wrap a callable with timing.

        Args:
            run: takes one list, like the callables of AOTAutograd's compilers.
            inputs: example inputs, which determine the device.
            backward: true for the backward graph.
        """
        on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs)
        timed = (_timed_on_gpu if on_gpu else _timed)(run, self._runs[backward])
        timed._boxed_call = True  # type: ignore[attr-defined]
        return timed

    def seconds(self) -> float | None:
        """Return the sum of the median forward and backward times; None until both have completed runs."""
        passes = [[s for run in runs if (s := _seconds(run)) is not None] for runs in self._runs.values()]
        return sum(map(median, passes)) if all(passes) else None


def _timed(run: Callable[..., Any], runs: deque[Any]) -> Callable[..., Any]:
    def timed(arguments: list[Any]) -> Any:
        begun = time.perf_counter()
        result = run(arguments)
        runs.append(time.perf_counter() - begun)
        return result

    return timed


def _timed_on_gpu(run: Callable[..., Any], runs: deque[Any]) -> Callable[..., Any]:
    def timed(arguments: list[Any]) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return run(arguments)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        result = run(arguments)
        end.record()
        runs.append((begin, end))
        return result

    return timed


def _seconds(run: Any) -> float | None:
    """Return the seconds of one run; None until the device has finished the run."""
    if isinstance(run, float):
        return run
    begin, end = run
    return begin.elapsed_time(end) / 1e3 if end.query() else None

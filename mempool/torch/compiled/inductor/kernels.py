"""Order of a graph's inductor kernels, and the bytes in use while each kernel runs."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch._inductor import config, ir, memory
from torch._inductor.scheduler import FusedSchedulerNode, NopKernelSchedulerNode, SchedulerNode
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from mempool.torch.compiled import ops
from mempool.torch.compiled.inductor.patches import dying_inputs
from mempool.torch.compiled.options import TUNABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import fx

    from mempool.torch.compiled.joint_graph import MergedGraph
    from mempool.torch.compiled.records import StepDecision


@dataclass(frozen=True, eq=False)
class KernelTransfer:
    """An offload or a reload among the kernels of a graph.

    Attributes:
        kernels: the kernels that begin the copy.
        awaited: the kernel that waits for the copy.
    """

    kernels: list[Any]
    awaited: Any

    @property
    def size(self) -> int:
        """Return the bytes of a reload."""
        return sum(buffer.mpi_buffer.size_alloc for buffer in self.awaited.get_outputs())


def reloads(order: Sequence[Any]) -> Iterator[KernelTransfer]:
    """Yield the reloads of a graph; the kernels must know the readers of their results."""
    return _copies(order, ops.reload, ops.reload_wait)


def offloads(order: Sequence[Any]) -> Iterator[KernelTransfer]:
    """Yield the offloads of a graph; each keeps its arguments alive until the wait."""
    return _copies(order, ops.offload, ops.offload_wait)


def _copies(order: Sequence[Any], begins: Any, ends: Any) -> Iterator[KernelTransfer]:
    for kernel in order:
        first = [kernel] if _calls(kernel, begins) else []
        for kernel in first:
            for reader in [user for buffer in kernel.get_outputs() for user in buffer.mpi_buffer.succ_nodes]:
                if _calls(reader, ends):
                    yield KernelTransfer(first, reader)
                else:
                    first.append(reader)  # the `getitem` of the ticket


def _calls(kernel: Any, operation: Any) -> bool:
    return getattr(kernel.node, "op_overload", None) is operation


def by_operation_order(nodes: Sequence[Any]) -> list[Any]:
    """Order kernels by the position of their last operation, so that copies keep their positions."""
    waits = {node: len(node.mpi_node.pred_nodes) for node in nodes}
    number = itertools.count()
    ready = [(node.max_order, next(number), node) for node in nodes if not waits[node]]
    heapq.heapify(ready)
    order = []
    while ready:
        *_, node = heapq.heappop(ready)
        order.append(node)
        for after in node.mpi_node.succ_nodes:
            waits[after] -= 1
            if not waits[after]:
                heapq.heappush(ready, (after.max_order, next(number), after))
    return order


def delay_reloads(order: Sequence[Any], loads: NDArray[np.int64], limit: int) -> list[Any]:
    """Delay reloads that are in flight while the limit is exceeded, which costs only time.

    Args:
        order: the kernels in order.
        loads: bytes while each kernel runs.
        limit: bytes.
    """
    place = {kernel: i for i, kernel in enumerate(order)}
    copies = sorted(reloads(order), key=lambda copy: -place[copy.awaited])  # the latest wait first
    begins = [place[copy.kernels[0]] for copy in copies]
    left, later = loads.copy(), set()
    for step in range(len(order)):
        for i, copy in enumerate(copies):
            if left[step] > limit and begins[i] <= step < place[copy.awaited]:
                left[begins[i] : step + 1] -= copy.size
                begins[i] = step + 1
                later.update(copy.kernels)
    before: dict[int, list[Any]] = defaultdict(list)
    for begin, copy in zip(begins, copies, strict=True):
        before[begin] += [kernel for kernel in copy.kernels if kernel in later]
    result = []
    for i, kernel in enumerate(order):
        result += before[i]
        result += [] if kernel in later else [kernel]
    return result


def group_cpu_kernels(
    order: Sequence[Any], loads: NDArray[np.int64], made: NDArray[np.int64], limit: int
) -> tuple[NDArray[np.int64], set[Any]]:
    """Count the bytes on the CPU, where inductor groups consecutive kernels into one call.

    All results of such a group exist when the group begins, and all inputs stay until the group ends. A group
    cannot end after a node without a kernel, such as the concatenation of finished parts.

    Args:
        order: the kernels in order.
        loads: bytes while each kernel runs, for ungrouped kernels.
        made: bytes of the results of each kernel.
        limit: bytes; a group ends before a kernel would exceed the limit.

    Returns:
        Bytes while the group of each kernel runs, and the kernels after which a group must end.
    """
    together, ends = loads.copy(), set()
    first = last = None  # the group's first kernel, and the last kernel after which the group can end
    for i, kernel in enumerate(order):
        device = kernel.get_device()
        if kernel.is_extern() or kernel.is_template() or device is None or device.type != "cpu":
            first = last = None
            continue
        if first is not None and last is not None and together[first] + made[i] > limit:
            ends.add(order[last])
            first = last + 1 if last + 1 < i else None
            last = None
        if first is None:
            first = i
        together[first : i + 1] = loads[first] + made[first + 1 : i + 1].sum()
        if not isinstance(kernel, NopKernelSchedulerNode):
            last = i
    return together, ends


class _InPlaceRecorder:
    """A stand-in for inductor's kernel handler that records which results reuse the memory of an input."""

    def __init__(self) -> None:
        self.args = self
        self.inplace_update_buffers: dict[str, str] = {}

    def make_inplace(self, read: str, made: str) -> None:
        """Ignore the notification of an in-place update."""


def in_place_results(order: Sequence[Any]) -> dict[str, str]:
    """Map each in-place result to the name of the input that it overwrites.

    Args:
        order: the order of the kernels, which determines the last readers.
    """
    scheduler = V.graph.scheduler
    completed, recorder = scheduler.completed_operations, _InPlaceRecorder()
    scheduler.completed_operations = OrderedSet(completed)
    try:
        with V.set_kernel_handler(recorder):
            for kernel in order:
                for part in kernel.get_nodes():
                    if isinstance(part, SchedulerNode):
                        part.decide_inplace_update()
                scheduler.completed_operations.update(kernel.get_operation_names())
    finally:
        scheduler.completed_operations = completed
    return recorder.inplace_update_buffers


#: Inductor settings for small kernels, which read and write few tensors each; a long sum is split.
_SMALL = {
    "max_fusion_unique_io_buffers": TUNABLES.small_kernel_buffers,
    "realize_acc_reads_threshold": TUNABLES.small_kernel_reads,
}


class Kernels:
    """Inductor pass that chooses the order of a graph's kernels and counts the bytes in use.

    Inductor's own choice of an order counts only inductor's allocations, without reload destinations before
    the wait and without workspaces of kernels.

    Attributes:
        constant_bytes: bytes in use all the time.
        given: maps the name of each input that is freed after its last reader to (memory, bytes of the
            memory).
        workspace: workspace bytes of an operation, by node name.
        limit: bytes that no kernel should exceed.
        small: true if kernels shall read and write few tensors each.
        stop_when_known: true to stop compiling when the kernels are known.
        initial_bytes: bytes in use before the first kernel runs.
        known: true once the kernels are known; `loads` and `operations` then describe them.
        loads: bytes while each kernel runs: int64[kernels]; without kernels one entry, for the inputs.
        operations: the node names of each kernel.
    """

    def __init__(
        self,
        constant_bytes: int,
        given: Mapping[str, tuple[int, int]],
        workspace: Mapping[str, int],
        *,
        limit: int,
        small: bool = False,
        stop_when_known: bool = False,
    ) -> None:
        self.constant_bytes, self.workspace = constant_bytes, workspace
        self.limit, self.small, self.stop_when_known = limit, small, stop_when_known
        self.given = given
        self.initial_bytes = constant_bytes + sum(dict(given.values()).values())
        self.loads = np.array([self.initial_bytes])
        self.operations: list[list[str]] = [[]]
        self.known = False

    def settings(self) -> dict[str, Any]:
        """Return the inductor settings that install this pass."""
        settings = {"_post_fusion_custom_pass": self, "reorder_for_peak_memory": False}
        return settings | {
            name: most for name, most in _SMALL.items() if self.small and hasattr(config, name)
        }

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """Return the kernels in the chosen order."""
        scheduler = V.graph.scheduler
        if V.graph.name:  # the graph of a branch inside a kernel
            return nodes
        known = scheduler.name_to_buf, scheduler.name_to_fused_node, OrderedSet(V.graph.graph_inputs)
        outputs = OrderedSet(V.graph.get_output_names())
        _, inputs = memory.prepare_planning_info(nodes, *known, outputs)

        def counted(order: list[Any]) -> tuple[list[Any], NDArray[np.int64], set[Any]]:
            loads, made = self._loads(order, inputs, outputs)
            return order, *group_cpu_kernels(order, loads, made, self.limit)

        def needed(candidate: tuple[list[Any], NDArray[np.int64], set[Any]]) -> int:
            return int(candidate[1].max())

        found = [counted(by_operation_order(nodes))]
        if needed(found[0]) > self.limit:
            found += [
                counted(nodes),
                counted(memory.reorder_for_peak_memory(nodes, *known, outputs)),
            ]
            orders = found.copy()
            for most in (self.limit, 0):
                if min(map(needed, found)) > self.limit:
                    found += [counted(delay_reloads(order, loads, most)) for order, loads, _ in orders]
        least = min(found, key=needed)
        order, self.loads, ends = next(
            (candidate for candidate in found if needed(candidate) <= self.limit), least
        )
        self.operations, self.known = [*map(_operations, order)], True
        if self.stop_when_known:
            raise KernelsKnownError
        if ends:
            _end_after(ends, scheduler)
        return order

    def _loads(
        self, order: Sequence[Any], inputs: Any, outputs: Any
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the bytes in use during each kernel of an order, and the bytes of its new buffers."""
        buffers, place, _ = memory.compute_memory_timeline(order, inputs, outputs)
        begins, kept, over = (
            _concatenation_starts(buffers),
            _offload_ends(order, place),
            in_place_results(order),
        )
        count = len(order)
        lasts = {
            buffer.buffer.get_name(): buffer.end_step % count for buffer in buffers
        }  # -1: lives to the end
        lasts = {name: max(last, kept.get(name, 0)) for name, last in lasts.items()}
        memories, made = _BufferMemory(self.given, lasts), np.zeros(count, np.int64)
        for buffer in buffers:
            name, begin = buffer.buffer.get_name(), buffer.start_step
            if isinstance(buffer.buffer, memory.FreeableInputBuffer) or not _has_memory(buffer, order[begin]):
                continue
            begin = min(begins.get(name, begin), begin)
            if not memories.reuse(name, over.get(name), begin):
                memories.allocate(name, buffer.size_free)
                made[begin] += buffer.size_alloc
        freed_bytes = memories.freed_bytes(count)
        load: NDArray[np.int64] = self.initial_bytes + np.cumsum(made - freed_bytes[:-1])
        for copy in reloads(order):
            load[place[copy.kernels[0]] : place[copy.awaited]] += copy.size
        load += np.array([self._workspace(node) for node in order], np.int64)
        return load, made

    def _workspace(self, kernel: Any) -> int:
        """Return the workspace bytes of a kernel that calls one of PyTorch's operations."""
        names = (name for part in kernel.get_nodes() for name in _operation(part))
        return max((self.workspace.get(name, 0) for name in names), default=0)


class _BufferMemory:
    """Memories of inputs and kernel results, each with the step of its free."""

    def __init__(self, given: Mapping[str, tuple[int, int]], lasts: Mapping[str, int]) -> None:
        """Start before the first kernel.

        Args:
            given: see `Kernels`.
            lasts: by buffer name, the step of the last kernel that needs the buffer; -1: alive to the end.
        """
        self._lasts = lasts
        self._size: dict[int | str, int] = dict(given.values())  # by input's memory or result's name
        self._end = dict.fromkeys(self._size, -1)
        self._whose: dict[str, int | str] = {name: base for name, (base, _) in given.items()}
        for name in lasts.keys() & self._whose.keys():
            whose = self._whose[name]
            self._end[whose] = max(self._end[whose], lasts[name])

    def reuse(self, name: str, former: str | None, begin: int) -> bool:
        """Try to reuse the memory of buffer `former`, if the last reader of `former` runs at step `begin`."""
        whose = self._whose.get(former, former) if former is not None else None
        if whose is None or self._end.get(whose) != begin:
            return False
        self._whose[name], self._end[whose] = whose, self._lasts[name]
        return True

    def allocate(self, name: str, size: int) -> None:
        """Record a buffer with new memory."""
        self._whose[name], self._end[name], self._size[name] = name, self._lasts[name], size

    def freed_bytes(self, count: int) -> NDArray[np.int64]:
        """Return the bytes freed before each of `count` kernels begins, and after the last one."""
        result = np.zeros(count + 1, np.int64)
        for whose, end in self._end.items():
            result[end % count + 1] += self._size[whose]  # memory without a reader is freed last
        return result


def _offload_ends(order: Sequence[Any], place: Mapping[Any, int]) -> dict[str, int]:
    """Map each buffer under offload to the last step that needs its memory."""
    until: dict[str, int] = {}
    for copy in offloads(order):
        for read in copy.kernels[0].read_writes.reads:
            until[read.name] = max(until.get(read.name, 0), place[copy.awaited])
    return until


def _concatenation_starts(buffers: Sequence[Any]) -> dict[str, int]:
    """Map each concatenation buffer to the first step that writes one of the parts."""
    begins: dict[str, int] = {}
    for buffer in buffers:
        if (whole := _container(buffer.buffer)) is not None:
            begins[whole] = min(begins.get(whole, buffer.start_step), buffer.start_step)
    return begins


def _container(buffer: Any) -> str | None:
    """Return the name of the buffer that contains this buffer; None if the buffer has its own memory."""
    layout = getattr(getattr(buffer, "node", None), "layout", None)
    return layout.view.get_name() if isinstance(layout, ir.NonOwningLayout) else None


def _has_memory(buffer: Any, kernel: Any) -> bool:
    """Return false for values inside a fused kernel and for parts of another buffer."""
    if _container(buffer.buffer) is not None:
        return False
    if type(kernel) is not FusedSchedulerNode:
        return True
    own = OrderedSet(part.get_name() for part in kernel.get_nodes())
    return not V.graph.scheduler.can_buffer_be_removed_through_fusion(buffer.buffer.get_name(), own)


def _end_after(ends: set[Any], scheduler: Any) -> None:
    """Make inductor end its group of CPU kernels after each of these kernels."""
    backend = scheduler.get_backend(next(iter(ends)).get_device())
    full = backend.ready_to_flush
    backend.ready_to_flush = lambda: full() or scheduler.current_node in ends


class KernelsKnownError(Exception):
    """Raised to stop inductor once the kernels are known, before anything is compiled."""


def _operation(part: Any) -> list[str]:
    """Return the name of the operation that a part of a kernel calls, in a list; else an empty list."""
    if not part.is_extern() or isinstance(part.node, ir.MultiOutput):  # a `getitem` of several results
        return []
    return [node.name for node in itertools.islice(part.node.get_origins(), 1)]  # without arguments


def _operations(kernel: Any) -> list[str]:
    names = [node.name for part in kernel.get_nodes() if part.node for node in part.node.get_origins()]
    return [*dict.fromkeys(names)]


def kernel_passes(
    merged: MergedGraph,
    decision: StepDecision,
    workspace: Callable[[fx.Node], int],
    limit: int,
    *,
    small: bool,
    stop_when_known: bool = False,
) -> dict[bool, Kernels]:
    """Return the passes over the kernels of the forward graph (False) and the backward graph (True).

    Args:
        merged: the graphs, with the decision applied.
        decision: the decision.
        workspace: returns the workspace bytes of an operation.
        limit: bytes that no kernel should exceed.
        small: true if kernels shall read and write few tensors each.
        stop_when_known: true to stop compiling when the kernels are known.
    """
    graph, halves = decision.captured.graph, merged.halves
    lasting, given = decision.lasting, dict(dying_inputs(merged, decision))
    here, is_input = ~graph.host, graph.producer < 0
    for gradient in () if decision.gradients_stay else decision.captured.incoming_gradients:
        if not lasting[gradient] and here[gradient]:  # a gradient freed after its last reader
            node = decision.captured.values[gradient]
            assert node is not None
            given[merged.source[node].name] = gradient, int(graph.size[gradient])
            is_input[gradient] = False
    inputs, results = here & is_input, here & ~is_input & ~graph.backward[graph.producer] & lasting
    read = {False: inputs & graph.lasting, True: results | inputs & (lasting | ~graph.lasting)}
    constant_bytes = {
        backward: decision.outside.during(backward=backward) + int(graph.size[there].sum())
        for backward, there in read.items()
    }

    def kernels(module: fx.GraphModule, constant_bytes: int, given: Mapping[str, tuple[int, int]]) -> Kernels:
        nodes = {node.name: node for node in module.graph.nodes if node.op == "call_function"}
        own = {name: workspace(node) for name, node in nodes.items()}
        return Kernels(constant_bytes, given, own, limit=limit, small=small, stop_when_known=stop_when_known)

    return {
        False: kernels(halves.forward, constant_bytes[False], {}),
        True: kernels(halves.backward, constant_bytes[True], given),
    }

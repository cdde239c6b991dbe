"""Order the kernels that inductor makes of a graph, and count the bytes in use while each of them runs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from torch._inductor import config, ir, memory
from torch._inductor.scheduler import FusedSchedulerNode
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from mempool.torch.compiled.inductor.donated import handed_over
from mempool.torch.compiled.inductor.in_place import in_place
from mempool.torch.compiled.inductor.kernel_orders import coming, delayed, grouped, late, leaving

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import fx

    from mempool.torch.compiled.decision import Decided
    from mempool.torch.compiled.merged_graph import Joined


#: Inductor settings for kernels that read and write few tensors each; a long sum is split into parts.
_SMALL = {"max_fusion_unique_io_buffers": 8, "realize_acc_reads_threshold": 3}


class Kernels:
    """An inductor pass over the kernels of a graph that chooses their order and counts the bytes in use.

    Inductor's own choice of an order counts only inductor's allocations. Destinations of reloads before the
    wait and workspaces of kernels are missing there.

    Attributes:
        stays: bytes in use all the time.
        given: maps the name of each input that dies with the last reader to (memory, bytes of the memory).
        workspace: workspace bytes of an operation, by node name.
        limit: bytes that no kernel should exceed.
        small: true if kernels shall read and write few tensors each.
        only_look: true to stop compiling when the kernels are known.
        begun: bytes in use before the first kernel runs.
        known: true once the kernels are known; `loads` and `operations` then describe them.
        loads: bytes while each kernel runs: int64[kernels]; without kernels one entry, for the inputs.
        operations: the node names of each kernel.
    """

    def __init__(
        self,
        stays: int,
        given: Mapping[str, tuple[int, int]],
        workspace: Mapping[str, int],
        *,
        limit: int,
        small: bool = False,
        only_look: bool = False,
    ) -> None:
        self.stays, self.workspace = stays, workspace
        self.limit, self.small, self.only_look = limit, small, only_look
        self.given = given
        self.begun = stays + sum(dict(given.values()).values())
        self.loads = np.array([self.begun])
        self.operations: list[list[str]] = [[]]
        self.known = False

    def settings(self) -> dict[str, Any]:
        """Return the inductor settings that install this pass."""
        told = {"_post_fusion_custom_pass": self, "reorder_for_peak_memory": False}
        return told | {name: most for name, most in _SMALL.items() if self.small and hasattr(config, name)}

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
            return order, *grouped(order, loads, made, self.limit)

        def needed(one: tuple[list[Any], NDArray[np.int64], set[Any]]) -> int:
            return int(one[1].max())

        found = [counted(late(nodes))]
        if needed(found[0]) > self.limit:
            found += [
                counted(nodes),
                counted(memory.reorder_for_peak_memory(nodes, *known, outputs)),
            ]
            orders = found.copy()
            for most in (self.limit, 0):
                if min(map(needed, found)) > self.limit:
                    found += [counted(delayed(order, loads, most)) for order, loads, _ in orders]
        least = min(found, key=needed)
        order, self.loads, ends = next((one for one in found if needed(one) <= self.limit), least)
        self.operations, self.known = [*map(_operations, order)], True
        if self.only_look:
            raise EnoughError
        if ends:
            _end_after(ends, scheduler)
        return order

    def _loads(
        self, order: Sequence[Any], inputs: Any, outputs: Any
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for each kernel of an order the bytes in use and the bytes of new buffers."""
        buffers, place, _ = memory.compute_memory_timeline(order, inputs, outputs)
        begins, kept, over = _pieces(buffers), _kept(order, place), in_place(order)
        count = len(order)
        lasts = {one.buffer.get_name(): one.end_step % count for one in buffers}  # -1: alive to the end
        lasts = {name: max(last, kept.get(name, 0)) for name, last in lasts.items()}
        memories, made = _Memories(self.given, lasts), np.zeros(count, np.int64)
        for one in buffers:
            name, begin = one.buffer.get_name(), one.start_step
            if isinstance(one.buffer, memory.FreeableInputBuffer) or not _has_memory(one, order[begin]):
                continue
            begin = min(begins.get(name, begin), begin)
            if not memories.takes_over(name, over.get(name), begin):
                memories.makes(name, one.size_free)
                made[begin] += one.size_alloc
        gone = memories.gone(count)
        load: NDArray[np.int64] = self.begun + np.cumsum(made - gone[:-1])
        for one in coming(order):
            load[place[one.kernels[0]] : place[one.awaited]] += one.size
        load += np.array([self._workspace(node) for node in order], np.int64)
        return load, made

    def _workspace(self, kernel: Any) -> int:
        """Return the workspace bytes of a kernel that calls one of PyTorch's operations."""
        names = (name for part in kernel.get_nodes() for name in _operation(part))
        return max((self.workspace.get(name, 0) for name in names), default=0)


class _Memories:
    """The memories of inputs and kernel results, with the step at which each memory is freed."""

    def __init__(self, given: Mapping[str, tuple[int, int]], lasts: Mapping[str, int]) -> None:
        """Start before the first kernel.

        Args:
            given: see `Kernels`.
            lasts: by buffer name, the step of the last kernel that needs the buffer; -1: alive to the end.
        """
        self._lasts = lasts
        self._size: dict[int | str, int] = dict(given.values())  # by the input's memory or the maker's name
        self._end = dict.fromkeys(self._size, -1)
        self._whose: dict[str, int | str] = {name: base for name, (base, _) in given.items()}
        for name in lasts.keys() & self._whose.keys():
            whose = self._whose[name]
            self._end[whose] = max(self._end[whose], lasts[name])

    def takes_over(self, name: str, former: str | None, begin: int) -> bool:
        """Try to reuse the memory of buffer `former`, if the last reader of `former` runs at step `begin`."""
        whose = self._whose.get(former, former) if former is not None else None
        if whose is None or self._end.get(whose) != begin:
            return False
        self._whose[name], self._end[whose] = whose, self._lasts[name]
        return True

    def makes(self, name: str, size: int) -> None:
        """Record a buffer with new memory."""
        self._whose[name], self._end[name], self._size[name] = name, self._lasts[name], size

    def gone(self, count: int) -> NDArray[np.int64]:
        """Return the bytes freed before each of `count` kernels begins, and after the last one."""
        result = np.zeros(count + 1, np.int64)
        for whose, end in self._end.items():
            result[end % count + 1] += self._size[whose]  # memory that no kernel reads is freed last
        return result


def _kept(order: Sequence[Any], place: Mapping[Any, int]) -> dict[str, int]:
    """Map buffers that are being offloaded to the step until which the memory must stay."""
    until: dict[str, int] = {}
    for one in leaving(order):
        for read in one.kernels[0].read_writes.reads:
            until[read.name] = max(until.get(read.name, 0), place[one.awaited])
    return until


def _pieces(buffers: Sequence[Any]) -> dict[str, int]:
    """Map each concatenation buffer to the first step that writes one of the parts."""
    begins: dict[str, int] = {}
    for one in buffers:
        if (whole := _whole(one.buffer)) is not None:
            begins[whole] = min(begins.get(whole, one.start_step), one.start_step)
    return begins


def _whole(buffer: Any) -> str | None:
    """Return the name of the buffer that contains this one; None if the buffer has separate memory."""
    layout = getattr(getattr(buffer, "node", None), "layout", None)
    return layout.view.get_name() if isinstance(layout, ir.NonOwningLayout) else None


def _has_memory(one: Any, kernel: Any) -> bool:
    """Return false for a value inside a fused kernel and for a piece of another buffer."""
    if _whole(one.buffer) is not None:
        return False
    if type(kernel) is not FusedSchedulerNode:
        return True
    own = OrderedSet(part.get_name() for part in kernel.get_nodes())
    return not V.graph.scheduler.can_buffer_be_removed_through_fusion(one.buffer.get_name(), own)


def _end_after(ends: set[Any], scheduler: Any) -> None:
    """Let groups of CPU kernels end after these kernels."""
    backend = scheduler.get_backend(next(iter(ends)).get_device())
    full = backend.ready_to_flush
    backend.ready_to_flush = lambda: full() or scheduler.current_node in ends


class EnoughError(Exception):
    """Raised to stop inductor once the kernels are known, before anything is compiled."""


def _operation(part: Any) -> list[str]:
    """Return the name of the operation that a part of a kernel calls, as a list of at most one."""
    if not part.is_extern() or isinstance(part.node, ir.MultiOutput):  # one of several results
        return []
    return [one.name for one in itertools.islice(part.node.get_origins(), 1)]  # the arguments follow


def _operations(kernel: Any) -> list[str]:
    names = [one.name for part in kernel.get_nodes() if part.node for one in part.node.get_origins()]
    return [*dict.fromkeys(names)]


def passes_of(
    joined: Joined,
    made: Decided,
    workspace: Callable[[fx.Node], int],
    limit: int,
    *,
    small: bool,
    only_look: bool = False,
) -> dict[bool, Kernels]:
    """Return the passes over the kernels of the forward graph (False) and the backward graph (True).

    Args:
        joined: the graphs, with the decision applied.
        made: the decision.
        workspace: returns the workspace bytes of an operation.
        limit: bytes that no kernel should exceed.
        small: true if kernels shall read and write few tensors each.
        only_look: true to stop compiling when the kernels are known.
    """
    graph, halves = made.captured.graph, joined.halves
    lasting, given = made.lasting, dict(handed_over(joined, made))
    here, is_input = ~graph.host, graph.producer < 0
    for one in () if made.gradients_stay else made.captured.incoming:
        if not lasting[one] and here[one]:  # a gradient that dies with the last reader
            node = made.captured.values[one]
            assert node is not None
            given[joined.source[node].name] = one, int(graph.size[one])
            is_input[one] = False
    inputs, results = here & is_input, here & ~is_input & ~graph.backward[graph.producer] & lasting
    read = {False: inputs & graph.lasting, True: results | inputs & (lasting | ~graph.lasting)}
    stays = {
        backward: made.outside.during(backward=backward) + int(graph.size[there].sum())
        for backward, there in read.items()
    }

    def kernels(module: fx.GraphModule, stays: int, given: Mapping[str, tuple[int, int]]) -> Kernels:
        nodes = {node.name: node for node in module.graph.nodes if node.op == "call_function"}
        own = {name: workspace(node) for name, node in nodes.items()}
        return Kernels(stays, given, own, limit=limit, small=small, only_look=only_look)

    return {
        False: kernels(halves.forward, stays[False], {}),
        True: kernels(halves.backward, stays[True], given),
    }

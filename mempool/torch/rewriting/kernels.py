"""The kernels that inductor makes of a graph: their order, and the bytes that each needs while it runs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from torch._inductor import config, ir, memory
from torch._inductor.scheduler import FusedSchedulerNode
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from mempool.torch.rewriting.donated import handed_over
from mempool.torch.rewriting.in_place import in_place
from mempool.torch.rewriting.kernel_orders import coming, delayed, grouped, late, leaving

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import fx

    from mempool.torch.rewriting.decided import Decided
    from mempool.torch.rewriting.joined import Joined


#: By which inductor makes kernels that read and write few tensors each; a sum of many is added up by parts.
_SMALL = {"max_fusion_unique_io_buffers": 8, "realize_acc_reads_threshold": 3}


class Kernels:
    """A pass of inductor's over the kernels of a graph: it chooses their order, and counts what they need.

    Inductor's own choice among orders counts only what it allocates itself, and not what a copy back fills
    before anybody waits for it, nor what kernels take for themselves.

    Attributes:
        stays: bytes that are there all the time.
        given: of each input that goes when its last reader ends, by its name, the memory that it is in, and
            the bytes of that.
        workspace: bytes that an operation has for itself, by the name of its node.
        limit: bytes that no kernel should need more than.
        small: whether kernels read and write few tensors each.
        only_look: whether to stop when the kernels are known.
        begun: bytes that are there before the first kernel runs.
        known: whether they are; if so, `loads` and `operations` are of them.
        loads: bytes while each kernel runs: int64[kernels]; of no kernel, one for what is given.
        operations: of each kernel the names of their nodes.
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
        """What inductor must be told."""
        told = {"_post_fusion_custom_pass": self, "reorder_for_peak_memory": False}
        return told | {name: most for name, most in _SMALL.items() if self.small and hasattr(config, name)}

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """The kernels in their order."""
        scheduler = V.graph.scheduler
        if V.graph.name:  # of a branch, inside of a kernel
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
        """Bytes while each kernel runs, in an order, and of these what it makes."""
        buffers, place, _ = memory.compute_memory_timeline(order, inputs, outputs)
        begins, kept, over = _pieces(buffers), _kept(order, place), in_place(order)
        count = len(order)
        lasts = {one.buffer.get_name(): one.end_step % count for one in buffers}  # -1: the last of all
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
        """Bytes that a kernel has for itself, where it is one of PyTorch's operations."""
        names = (name for part in kernel.get_nodes() for name in _operation(part))
        return max((self.workspace.get(name, 0) for name in names), default=0)


class _Memories:
    """What kernels are given, make and take over, and when it goes."""

    def __init__(self, given: Mapping[str, tuple[int, int]], lasts: Mapping[str, int]) -> None:
        """Nothing is made yet.

        Args:
            given: see `Kernels`.
            lasts: of each buffer the step of the last kernel that needs it, -1 of the last of all.
        """
        self._lasts = lasts
        self._size: dict[int | str, int] = dict(given.values())  # by the input's memory, or who made it
        self._end = dict.fromkeys(self._size, -1)
        self._whose: dict[str, int | str] = {name: base for name, (base, _) in given.items()}
        for name in lasts.keys() & self._whose.keys():
            whose = self._whose[name]
            self._end[whose] = max(self._end[whose], lasts[name])

    def takes_over(self, name: str, former: str | None, begin: int) -> bool:
        """Whether a buffer takes over the memory of another one, if that is read for the last time then."""
        whose = self._whose.get(former, former) if former is not None else None
        if whose is None or self._end.get(whose) != begin:
            return False
        self._whose[name], self._end[whose] = whose, self._lasts[name]
        return True

    def makes(self, name: str, size: int) -> None:
        """A buffer has memory of its own."""
        self._whose[name], self._end[name], self._size[name] = name, self._lasts[name], size

    def gone(self, count: int) -> NDArray[np.int64]:
        """Bytes that are there no more when each of so many kernels begins, and after the last."""
        result = np.zeros(count + 1, np.int64)
        for whose, end in self._end.items():
            result[end % count + 1] += self._size[whose]  # what no kernel reads goes last
        return result


def _kept(order: Sequence[Any], place: Mapping[Any, int]) -> dict[str, int]:
    """Until which step buffers are kept at least, since they are being copied out."""
    until: dict[str, int] = {}
    for one in leaving(order):
        for read in one.kernels[0].read_writes.reads:
            until[read.name] = max(until.get(read.name, 0), place[one.awaited])
    return until


def _pieces(buffers: Sequence[Any]) -> dict[str, int]:
    """Of each buffer that is put together of others, which are made in it, the step of the first of these."""
    begins: dict[str, int] = {}
    for one in buffers:
        if (whole := _whole(one.buffer)) is not None:
            begins[whole] = min(begins.get(whole, one.start_step), one.start_step)
    return begins


def _whole(buffer: Any) -> str | None:
    """The name of the buffer that one is made in; None: it has memory of its own."""
    layout = getattr(getattr(buffer, "node", None), "layout", None)
    return layout.view.get_name() if isinstance(layout, ir.NonOwningLayout) else None


def _has_memory(one: Any, kernel: Any) -> bool:
    """Whether a buffer is more than a value inside of a kernel, or a piece of another buffer."""
    if _whole(one.buffer) is not None:
        return False
    if type(kernel) is not FusedSchedulerNode:
        return True
    own = OrderedSet(part.get_name() for part in kernel.get_nodes())
    return not V.graph.scheduler.can_buffer_be_removed_through_fusion(one.buffer.get_name(), own)


def _end_after(ends: set[Any], scheduler: Any) -> None:
    """Have groups of kernels on the CPU end after these."""
    backend = scheduler.get_backend(next(iter(ends)).get_device())
    full = backend.ready_to_flush
    backend.ready_to_flush = lambda: full() or scheduler.current_node in ends


class EnoughError(Exception):
    """The kernels are known, and nothing needs to be compiled."""


def _operation(part: Any) -> list[str]:
    """The operation that a part of a kernel calls, if it does."""
    if not part.is_extern() or isinstance(part.node, ir.MultiOutput):  # one of the results of another
        return []
    return [one.name for one in itertools.islice(part.node.get_origins(), 1)]  # then what it is given


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
    """Passes over the kernels of a step's forward and, under True, of its backward graph.

    Args:
        joined: the graphs, changed as was decided.
        made: what was decided.
        workspace: bytes that an operation has for itself.
        limit: bytes that no kernel should need more than.
        small: whether kernels are kept small.
        only_look: whether to stop when the kernels are known.
    """
    graph, halves = made.captured.graph, joined.halves
    lasting, given = made.lasting, dict(handed_over(joined, made))
    here, is_input = ~graph.host, graph.producer < 0
    for one in () if made.gradients_stay else made.captured.incoming:
        if not lasting[one] and here[one]:  # a gradient that goes when its last reader ends
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

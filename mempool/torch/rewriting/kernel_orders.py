"""Orders and groups of the kernels that inductor makes, by which they and copies back find room."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch._inductor.scheduler import NopKernelSchedulerNode

from mempool.torch.rewriting import ops

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Copy:
    """A copy out or back.

    Attributes:
        kernels: those that begin it.
        awaited: the one that waits for it.
    """

    kernels: list[Any]
    awaited: Any

    @property
    def size(self) -> int:
        """Of a copy back, its bytes."""
        return sum(buffer.mpi_buffer.size_alloc for buffer in self.awaited.get_outputs())


def coming(order: Sequence[Any]) -> Iterator[Copy]:
    """Copies back of a graph whose kernels know who reads what they make."""
    return _copies(order, ops.swap_in, ops.swapped_in)


def leaving(order: Sequence[Any]) -> Iterator[Copy]:
    """Copies out, which keep what they are given until they are waited for."""
    return _copies(order, ops.swap_out, ops.swapped_out)


def _copies(order: Sequence[Any], begins: Any, ends: Any) -> Iterator[Copy]:
    for kernel in order:
        begun = [kernel] if _calls(kernel, begins) else []
        for one in begun:
            for reader in [user for buffer in one.get_outputs() for user in buffer.mpi_buffer.succ_nodes]:
                if _calls(reader, ends):
                    yield Copy(begun, reader)
                else:
                    begun.append(reader)  # takes the ticket out of the first one's results


def _calls(kernel: Any, operation: Any) -> bool:
    return getattr(kernel.node, "op_overload", None) is operation


def late(nodes: Sequence[Any]) -> list[Any]:
    """Kernels where the last of their operations stands, so that copies are where they were put."""
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


def delayed(order: Sequence[Any], loads: NDArray[np.int64], limit: int) -> list[Any]:
    """The same, but copies back that are under way while there is too much begin later: that costs only time.

    Args:
        order: kernels.
        loads: bytes while each runs.
        limit: bytes.
    """
    place = {kernel: i for i, kernel in enumerate(order)}
    copies = sorted(coming(order), key=lambda one: -place[one.awaited])  # the last that is waited for first
    begins = [place[one.kernels[0]] for one in copies]
    left, later = loads.copy(), set()
    for step in range(len(order)):
        for i, one in enumerate(copies):
            if left[step] > limit and begins[i] <= step < place[one.awaited]:
                left[begins[i] : step + 1] -= one.size
                begins[i] = step + 1
                later.update(one.kernels)
    before: dict[int, list[Any]] = defaultdict(list)
    for begin, one in zip(begins, copies, strict=True):
        before[begin] += [kernel for kernel in one.kernels if kernel in later]
    result = []
    for i, kernel in enumerate(order):
        result += before[i]
        result += [] if kernel in later else [kernel]
    return result


def grouped(
    order: Sequence[Any], loads: NDArray[np.int64], made: NDArray[np.int64], limit: int
) -> tuple[NDArray[np.int64], set[Any]]:
    """What kernels need on the CPU, where inductor makes one call of those that follow each other.

    All that such a group makes is there when it begins, and all that it reads until it ends. It cannot end
    after what is no kernel, such as pieces that are together once they are made.

    Args:
        order: kernels.
        loads: bytes while each runs, if it is one call.
        made: bytes of what each makes.
        limit: bytes; groups end before they need more.

    Returns:
        Bytes while each kernel's group runs, and the kernels after which a group must end.
    """
    together, ends = loads.copy(), set()
    first = last = None  # of the group, and the last after which it can end
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

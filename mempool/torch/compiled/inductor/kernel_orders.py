"""Orders and groups of inductor's kernels that leave room for kernels and reloads."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch._inductor.scheduler import NopKernelSchedulerNode

from mempool.torch.compiled import ops

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Copy:
    """An offload or a reload.

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


def coming(order: Sequence[Any]) -> Iterator[Copy]:
    """Yield the reloads of a graph whose kernels know the readers of their results."""
    return _copies(order, ops.swap_in, ops.swapped_in)


def leaving(order: Sequence[Any]) -> Iterator[Copy]:
    """Yield the offloads, which keep their arguments alive until the wait."""
    return _copies(order, ops.swap_out, ops.swapped_out)


def _copies(order: Sequence[Any], begins: Any, ends: Any) -> Iterator[Copy]:
    for kernel in order:
        begun = [kernel] if _calls(kernel, begins) else []
        for one in begun:
            for reader in [user for buffer in one.get_outputs() for user in buffer.mpi_buffer.succ_nodes]:
                if _calls(reader, ends):
                    yield Copy(begun, reader)
                else:
                    begun.append(reader)  # takes the ticket out of several results


def _calls(kernel: Any, operation: Any) -> bool:
    return getattr(kernel.node, "op_overload", None) is operation


def late(nodes: Sequence[Any]) -> list[Any]:
    """Order kernels by the position of the last operation, so that copies stay where they were inserted."""
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
    """Delay reloads that are in flight while the limit is exceeded, which costs only time.

    Args:
        order: the kernels in order.
        loads: bytes while each kernel runs.
        limit: bytes.
    """
    place = {kernel: i for i, kernel in enumerate(order)}
    copies = sorted(coming(order), key=lambda one: -place[one.awaited])  # the latest wait first
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
    """Count the bytes on the CPU, where inductor makes one call of consecutive kernels.

    All results of such a group exist when the group begins, and all inputs stay until the group ends. A group
    cannot end after a node that is no kernel, such as the concatenation of finished parts.

    Args:
        order: the kernels in order.
        loads: bytes while each kernel runs, if each is a separate call.
        made: bytes of the results of each kernel.
        limit: bytes; a group ends before a larger need.

    Returns:
        Bytes while the group of each kernel runs, and the kernels after which a group must end.
    """
    together, ends = loads.copy(), set()
    first = last = None  # `first` of the group, and the `last` kernel after which the group can end
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

"""Find the results that inductor writes over kernel inputs, before anything is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._inductor.scheduler import SchedulerNode
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Told:
    """A stand-in for inductor's kernel handler that records which results reuse the memory of an input."""

    def __init__(self) -> None:
        self.args = self
        self.inplace_update_buffers: dict[str, str] = {}

    def make_inplace(self, read: str, made: str) -> None:
        """Ignore the notification of an in-place update."""


def in_place(order: Sequence[Any]) -> dict[str, str]:
    """Map each result that overwrites an input after the last read to the name of that input.

    Args:
        order: the order of the kernels, which determines the last readers.
    """
    scheduler = V.graph.scheduler
    completed, told = scheduler.completed_operations, _Told()
    scheduler.completed_operations = OrderedSet(completed)
    try:
        with V.set_kernel_handler(told):
            for kernel in order:
                for part in kernel.get_nodes():
                    if isinstance(part, SchedulerNode):
                        part.decide_inplace_update()
                scheduler.completed_operations.update(kernel.get_operation_names())
    finally:
        scheduler.completed_operations = completed
    return told.inplace_update_buffers

"""Which results inductor writes over what their kernels read, asked of it before anything is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._inductor.scheduler import SchedulerNode
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Told:
    """Stands for the kernel that is being made: the scheduler tells it which results take whose memory."""

    def __init__(self) -> None:
        self.args = self
        self.inplace_update_buffers: dict[str, str] = {}

    def make_inplace(self, read: str, made: str) -> None:
        """The scheduler tells this, too."""


def in_place(order: Sequence[Any]) -> dict[str, str]:
    """Of results that are written over what their kernels read for the last time, the names of both.

    Args:
        order: of the kernels, which decides who reads last.
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

"""Offsets and lifetimes of a schedule's copies in the host's arena."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mempool.torch.offload.host_memory import PAGE, pages
from mempool.torch.offload.options import OPTIONS
from solvers import Stop, solve
from solvers.swap.placement import host_buffers
from traces.buffers import Buffers

if TYPE_CHECKING:
    from collections.abc import Container

    from numpy.typing import NDArray

    from solvers.swap import Schedule, Step


@dataclass(frozen=True, eq=False)
class HostCopies:
    """A schedule's copies in the host's arena.

    Attributes:
        at: int64[q], offset of each move's copy, bytes.
        last: int64[c], the last operation that needs each copy, without permanent copies.
        of: int64[c], the rows of these copies' buffers in the step.
        size: bytes from the first to the last copy, whole pages.
    """

    at: NDArray[np.int64]
    last: NDArray[np.int64]
    of: NDArray[np.int64]
    size: int


def host_copies(
    step: Step, schedule: Schedule, unread: Container[tuple[int, int]] = frozenset()
) -> HostCopies:
    """Pack the copies of a circular step's schedule.

    A copy occupies its offset from the end of the operation before the offload to the end of the last
    operation that needs the copy, before further offloads start. In an access of `unread`, a (row,
    operation), nothing reads the copy, but the storage ends only after the operation: the copy remains until
    the end of the next one.

    Raises:
        PlanError: the sizes exceed the countable range.
    """
    copies, of, which = host_buffers(step, schedule, alignment=PAGE)
    k = max(len(step), 1)
    made = np.zeros(len(copies), np.bool_)  # copies made in each turn; others are permanent
    made[which[schedule.copied]] = True
    ends = zip(of.tolist(), copies.end.tolist(), strict=True)
    dies = np.array([(row, (end - 1) % k) in unread for row, end in ends], np.bool_)
    start, end = copies.start + made, copies.end + dies
    late = start // k * k
    lives = Buffers.of(start - late, end - late, copies.size, alignment=PAGE, period=k)
    at, size = packed(lives)
    return HostCopies(at[which], (end[made] - 1) % k, of[made], size)


def packed(copies: Buffers) -> tuple[NDArray[np.int64], int]:
    """Return the offset of each copy, the same in every turn, int64[n], and the total bytes in whole pages.

    Raises:
        PlanError: the sizes exceed the countable range.
    """
    plan = solve(copies, stop=Stop(nodes=OPTIONS.host_packing_nodes), columns=1)
    assert plan.offset is not None  # no capacity limits the plan
    return plan.offset[:, 0], pages(plan.arena_bytes)

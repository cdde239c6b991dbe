"""Where a program's copies lie on the host, and until when: packed by lifetime before anything moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mempool.torch.swapping.holes import PAGE, pages
from solvers import Stop, solve
from solvers.swap.pool import host_buffers
from traces.buffers import Buffers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.swap import Schedule, Step

#: Nodes of the search; the first plan is a good one.
_NODES = 2000


@dataclass(frozen=True, eq=False)
class HostCopies:
    """A schedule's copies in the host's arena.

    Attributes:
        at: int64[q], of each move where its copy lies, bytes.
        last: int64[c], the operation after which each copy is needed no more, of those that are not for ever.
        of: int64[c], the rows in the step of these.
        size: bytes from the first to the last of all, whole pages.
    """

    at: NDArray[np.int64]
    last: NDArray[np.int64]
    of: NDArray[np.int64]
    size: int


def host_copies(step: Step, schedule: Schedule) -> HostCopies:
    """The copies of a schedule of a circular step, packed.

    A copy takes its place when the operation after which it is asked for has ended, and gives it back when
    the last that needs it has, before others leave.

    Raises:
        PlanError: more than can be counted.
    """
    copies, of, which = host_buffers(step, schedule, alignment=PAGE)
    k = max(len(step), 1)
    made = np.zeros(len(copies), np.bool_)  # anew in each turn; others are there for ever
    made[which[schedule.copied]] = True
    start, end = copies.start + made, copies.end
    late = start // k * k
    lives = Buffers.of(start - late, end - late, copies.size, alignment=PAGE, period=k)
    at, size = packed(lives)
    return HostCopies(at[which], (end[made] - 1) % k, of[made], size)


def packed(copies: Buffers) -> tuple[NDArray[np.int64], int]:
    """Where each of these copies lies, int64[n], and the bytes of whole pages from the first to the last.

    Raises:
        PlanError: more than can be counted.
    """
    plan = solve(copies, stop=Stop(nodes=_NODES), solver="search")
    assert plan.offset is not None  # there is no capacity that it could exceed
    return plan.offset[:, 0], pages(plan.arena_bytes)

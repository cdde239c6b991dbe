"""What the pool holds under a limit: that and no more, whatever lies where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from solvers import Stop, solve
from solvers.errors import PlanError
from solvers.swap.pool import device_buffers

if TYPE_CHECKING:
    from mempool import _core
    from solvers.swap import Schedule, Step

#: Planned iterations without a change of the moves, after which the pool may learn what recurs.
_CALM = 3
#: Work of the search for places, in nodes: some tenths of a second.
_NODES = 20_000_000


def arena_bytes(step: Step, schedule: Schedule, alignment: int) -> int:
    """Bytes of an arena for all that a schedule leaves on the device, whose offsets are planned.

    The load alone is less: where it is close to the limit all the time, buffers leave gaps.
    """
    buffers, _ = device_buffers(step, schedule, alignment=alignment)
    try:
        return solve(buffers, stop=Stop(nodes=_NODES)).arena_bytes
    except PlanError:  # more than can be counted
        return step.peak_bytes


class Settling:
    """Keeps a pool from learning while the moves still change.

    Every change of the moves makes other lifetimes of the same requests. A pool that planned those before
    would find buffers in the way of its plan, and plan around them, in an ever larger arena. Until a plan of
    its own is made a pool reserves little more than what lives.
    """

    def __init__(self, client: _core.Client | None) -> None:
        """Hold back the pool of a client; without one, none."""
        self._client = client
        self._calm = 0
        self._dynamic = False
        self.changed()

    @property
    def learns(self) -> bool:
        """Whether the pool does."""
        return not self._dynamic

    def changed(self) -> None:
        """The moves are others from now on."""
        self._calm = 0
        if self._client is not None and not self._dynamic:
            self._dynamic = True
            self._client.enter_dynamic()

    def went_by_plan(self) -> None:
        """An iteration followed the moves, which are as before."""
        self._calm += 1
        if self._calm == _CALM:
            self.end()

    def end(self) -> None:
        """Let the pool learn."""
        if self._client is not None and self._dynamic:
            self._dynamic = False
            self._client.give_back()
            self._client.leave_dynamic()

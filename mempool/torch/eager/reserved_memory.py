"""The pool's reserved memory under a limit: the arena's size, and the time at which the pool may plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from solvers import Stop, solve
from solvers.errors import PlanError
from solvers.swap.placement import device_buffers

if TYPE_CHECKING:
    from mempool import _core
    from solvers.swap import Schedule, Step

#: Planned iterations without a change of the moves, after which the pool may learn the pattern.
_CALM = 3
#: Node limit of the packing search: some tenths of a second.
_NODES = 20_000_000


def arena_bytes(step: Step, schedule: Schedule, alignment: int) -> int:
    """Return the bytes of an arena with planned offsets for all buffers that a schedule leaves on the device.

    The load alone is less: if the load is close to the limit all the time, buffers leave gaps.
    """
    buffers, _ = device_buffers(step, schedule, alignment=alignment)
    try:
        return solve(buffers, stop=Stop(nodes=_NODES)).arena_bytes
    except PlanError:  # sizes exceed the countable range
        return step.peak_bytes


class Settling:
    """Keeps a pool from learning while the moves still change.

    Each change of the moves changes the lifetimes of the same requests. A pool that planned earlier lifetimes
    would find planned places occupied, and plan around them in an ever larger arena. Until a pool has a plan,
    the pool reserves little more than the live bytes.
    """

    def __init__(self, client: _core.Client | None) -> None:
        """Stop a client's pool from learning; without a client, do nothing."""
        self._client = client
        self._calm = 0
        self._dynamic = False
        self.changed()

    @property
    def learns(self) -> bool:
        """Return whether the pool may learn."""
        return not self._dynamic

    def changed(self) -> None:
        """Record a change of the moves, and stop the pool's learning."""
        self._calm = 0
        if self._client is not None and not self._dynamic:
            self._dynamic = True
            self._client.enter_dynamic()

    def went_by_plan(self) -> None:
        """Record an iteration that followed unchanged moves."""
        self._calm += 1
        if self._calm == _CALM:
            self.end()

    def end(self) -> None:
        """Let the pool learn."""
        if self._client is not None and self._dynamic:
            self._dynamic = False
            self._client.give_back()
            self._client.leave_dynamic()

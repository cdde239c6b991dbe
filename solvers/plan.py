"""A plan: an offset for every buffer, and how good it is."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from solvers.bounds import peak_load
from solvers.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from traces.buffers import Buffers

#: Work that a solver does when the caller sets no limit of any kind; a fraction of a second.
DEFAULT_NODES = 300_000_000


class Status(enum.StrEnum):
    """What a plan claims. Running out of time or nodes is never `INFEASIBLE`."""

    OPTIMAL = "optimal"  #: no plan with any of the numbers of columns tried has a smaller arena
    FEASIBLE = "feasible"  #: a plan, perhaps not the smallest
    INFEASIBLE = "infeasible"  #: proven: no plan exists (within the capacity)
    UNKNOWN = "unknown"  #: none was found (within the capacity)


@dataclass(frozen=True)
class Stop:
    """When to stop looking for a smaller arena; whichever comes first. The lower bound always stops.

    Attributes:
        seconds: wall clock. A plan that the clock stopped is not reproducible, and says so.
        nodes: work, as the number of placed buffers looked at while placing others; reproducible on every
            machine. None is unlimited with ``seconds`` or ``interrupt`` given, `DEFAULT_NODES` otherwise.
        target_bytes: an arena that is small enough.
        interrupt: polled some hundred times a second; True stops.

    Raises:
        ValueError: a limit that is negative or not a number.
    """

    seconds: float | None = None
    nodes: int | None = None
    target_bytes: int | None = None
    interrupt: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "nodes", "target_bytes"):
            limit = getattr(self, name)
            if limit is not None and not limit >= 0:  # no number is neither
                raise ValueError(f"{name}={limit} is no limit")

    @property
    def node_budget(self) -> int | None:
        """Nodes that may be spent, or None for no limit."""
        if self.nodes is None and self.seconds is None and self.interrupt is None:
            return DEFAULT_NODES
        return self.nodes


@dataclass(frozen=True, eq=False)
class Plan:
    """Offsets for buffers, and how good they are.

    Attributes:
        offset: int64[n, U], bytes from the start of the arena, read-only; None when there is no plan. U is
            the number of iterations after which addresses repeat: 1 unless a buffer lives longer than the
            period. The instance that iteration i allocates uses column ``i % U``. -1 for persistent buffers.
        arena_bytes: size of the arena; 0 when there is no plan.
        lower_bound_bytes: no arena of a plan with as many columns, or another number tried, can be smaller.
        status: see `Status`.
        solver: name of the solver.
        seed: seed of its random numbers.
        seconds: time that it took.
        stopped_by: "bound" (the lower bound was reached), "proof", "nodes", "time", "target", "interrupt", or
            "finished" (nothing left to try); "" in plans given to ``on_improvement``.
        period: of the buffers, or None.
        reason: why there is no plan, one line; empty when there is one.
        nodes: work that it took, as in `Stop`; what OR-Tools does is not counted.
    """

    offset: NDArray[np.int64] | None
    arena_bytes: int
    lower_bound_bytes: int
    status: Status
    solver: str
    seed: int
    seconds: float
    stopped_by: str
    period: int | None = None
    reason: str = ""
    nodes: int = 0

    def __post_init__(self) -> None:
        for value in (self.arena_bytes, self.lower_bound_bytes):
            if not 0 <= value < 2**63:
                raise PlanError(f"an arena or a bound of {value} bytes")
        if self.offset is None:
            return
        offset = np.ascontiguousarray(self.offset, np.int64).view()
        if offset.ndim != 2 or offset.shape[1] < 1:
            raise PlanError(f"offsets have shape {offset.shape}, not (buffers, columns)")
        offset.flags.writeable = False
        object.__setattr__(self, "offset", offset)

    @property
    def columns(self) -> int:
        """U, after how many iterations the addresses repeat."""
        return 1 if self.offset is None else self.offset.shape[1]

    @property
    def gap(self) -> float:
        """How far the arena is above the lower bound, as a fraction of it; 0.0 is optimal."""
        return gap_of(self.arena_bytes, self.lower_bound_bytes)

    def fragmentation(self, load: Buffers | int) -> float:
        """``1 - peak load / arena``, of the buffers or of a peak load in bytes; 0.0 for an empty arena."""
        peak = load if isinstance(load, int) else peak_load(load)
        return 1 - peak / self.arena_bytes if self.arena_bytes else 0.0

    def keep(self, buffers: Buffers) -> Buffers:
        """The buffers with their offsets fixed to those of this plan; solved with others, they stay there.

        Args:
            buffers: those that the plan places, or the first of them.

        Raises:
            PlanError: no offsets, more buffers than offsets, or several addresses for one buffer.
        """
        if self.offset is None:
            raise PlanError("a plan without offsets keeps nothing")
        if self.columns > 1:
            raise PlanError(f"each buffer has {self.columns} addresses in turn; one can be fixed")
        if len(buffers) > len(self.offset):
            raise PlanError(f"{len(buffers)} buffers, and offsets for {len(self.offset)}")
        return dataclasses.replace(buffers, offset=self.offset[: len(buffers), 0])


def gap_of(arena_bytes: int, lower_bound_bytes: int) -> float:
    """How far an arena is above a bound, as a fraction of it."""
    if arena_bytes <= lower_bound_bytes:
        return 0.0
    return arena_bytes / lower_bound_bytes - 1 if lower_bound_bytes else float("inf")

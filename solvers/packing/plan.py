"""Plan: an offset for every buffer, with the arena size, lower bound, status and origin."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from solvers.errors import PlanError
from solvers.packing.bounds import peak_load

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from traces.buffers import Buffers

#: Node budget of a solver without any limit by the caller; a fraction of a second.
DEFAULT_NODES = 300_000_000


class Status(enum.StrEnum):
    """Status that a plan claims; a solve stopped by time or nodes is never `INFEASIBLE`."""

    OPTIMAL = "optimal"  #: no plan has a smaller arena, for any number of columns tried
    FEASIBLE = "feasible"  #: a valid plan, perhaps not the smallest
    INFEASIBLE = "infeasible"  #: proven: no plan exists (within the capacity)
    UNKNOWN = "unknown"  #: no plan was found (within the capacity)


@dataclass(frozen=True)
class Stop:
    """Limits of a solve, which ends at the first limit reached, and always at the lower bound.

    Attributes:
        seconds: wall-clock limit. A plan stopped by the clock is not reproducible; `Plan.stopped_by` then is
            "time".
        nodes: limit of work, in placed buffers examined during placements of others; reproducible on every
            machine. None: no limit if ``seconds`` or ``interrupt`` is given, otherwise `DEFAULT_NODES`.
        target_bytes: an arena that is small enough.
        interrupt: polled some hundred times a second; true stops the search.

    Raises:
        ValueError: a limit is negative or NaN.
    """

    seconds: float | None = None
    nodes: int | None = None
    target_bytes: int | None = None
    interrupt: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        for name in ("seconds", "nodes", "target_bytes"):
            limit = getattr(self, name)
            if limit is not None and not limit >= 0:  # also true for NaN
                raise ValueError(f"{name}={limit} is no limit")

    @property
    def node_budget(self) -> int | None:
        """Return the number of nodes that may be spent, or None for no limit."""
        if self.nodes is None and self.seconds is None and self.interrupt is None:
            return DEFAULT_NODES
        return self.nodes


@dataclass(frozen=True, eq=False)
class Plan:
    """Offsets for buffers, with their quality and origin.

    Attributes:
        offset: int64[n, U], bytes from the start of the arena, read-only; None if there is no plan. U is the
            number of iterations after which addresses repeat: 1 unless a buffer lives longer than the period.
            The instance allocated in iteration i uses column ``i % U``. -1 for persistent buffers.
        arena_bytes: size of the arena; 0 if there is no plan.
        lower_bound_bytes: lower bound on the arena, valid for all numbers of columns tried.
        status: see `Status`.
        solver: name of the solver.
        seed: seed of the solver's random numbers.
        seconds: wall-clock time of the solve.
        stopped_by: "bound" (the lower bound was reached), "proof", "nodes", "time", "target", "interrupt", or
            "finished" (nothing left to try); "" in plans given to ``on_improvement``.
        period: period of the buffers, or None.
        reason: one line about the reason why there is no plan; empty with a plan.
        nodes: work of the solve, as in `Stop`.

    Raises:
        PlanError: impossible sizes, or offsets of a wrong shape.
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
        """Return U, the number of iterations after which addresses repeat."""
        return 1 if self.offset is None else self.offset.shape[1]

    @property
    def gap(self) -> float:
        """Return the gap between arena and lower bound as a fraction of the bound; 0.0 is optimal."""
        return gap_of(self.arena_bytes, self.lower_bound_bytes)

    def fragmentation(self, load: Buffers | int) -> float:
        """Return ``1 - peak load / arena`` for buffers or a peak load in bytes; 0.0 for an empty arena."""
        peak = load if isinstance(load, int) else peak_load(load)
        return 1 - peak / self.arena_bytes if self.arena_bytes else 0.0

    def keep(self, buffers: Buffers) -> Buffers:
        """Return the buffers with offsets fixed to this plan, so that a later solve keeps their offsets.

        Args:
            buffers: the buffers of this plan, or the first of them.

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
    """Return the gap between an arena and a lower bound as a fraction of the bound."""
    if arena_bytes <= lower_bound_bytes:
        return 0.0
    return arena_bytes / lower_bound_bytes - 1 if lower_bound_bytes else float("inf")

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
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from traces.buffers import Buffers

#: Node budget of a solver when the caller sets no limit of any kind; a fraction of a second.
DEFAULT_NODES = 300_000_000
#: Largest number of arenas, and largest number of addresses that all arenas together may span.
MOST_ARENAS, MOST_ADDRESSES = 256, 2**60


class Status(enum.StrEnum):
    """Outcome that a plan claims. Running out of time or nodes is never `INFEASIBLE`."""

    OPTIMAL = "optimal"  #: no plan has a smaller arena, for any number of columns tried
    FEASIBLE = "feasible"  #: a valid plan, perhaps not the smallest
    INFEASIBLE = "infeasible"  #: proven: no plan exists (within the capacity)
    UNKNOWN = "unknown"  #: no plan was found (within the capacity)


@dataclass(frozen=True)
class Stop:
    """Limits of a solve; the first limit reached stops. Reaching the lower bound always stops.

    Attributes:
        seconds: wall-clock limit. A plan stopped by the clock is not reproducible; `Plan.stopped_by` then is
            "time".
        nodes: limit of work, the number of placed buffers examined while placing others; reproducible on
            every machine. None means no limit if ``seconds`` or ``interrupt`` is given, otherwise
            `DEFAULT_NODES`.
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
    """Offsets for buffers, with the quality and the origin of these offsets.

    Attributes:
        offset: int64[n, U], bytes from the start of the arena, read-only; None if there is no plan. U is the
            number of iterations after which addresses repeat: 1 unless a buffer lives longer than the period.
            The instance allocated in iteration i uses column ``i % U``. -1 for persistent buffers. With
            several arenas, offsets are addresses in one space that holds all arenas: see `in_arenas`.
        arena_bytes: size of the arena; 0 if there is no plan. With several arenas, the sum over the arenas of
            the bytes up to the end of the topmost buffer.
        lower_bound_bytes: lower bound on the arena, valid for the plan's number of columns and for all others
            tried.
        status: see `Status`.
        solver: name of the solver.
        seed: seed of the solver's random numbers.
        seconds: wall-clock time of the solve.
        stopped_by: "bound" (the lower bound was reached), "proof", "nodes", "time", "target", "interrupt", or
            "finished" (nothing left to try); "" in plans given to ``on_improvement``.
        period: period of the buffers, or None.
        reason: one line that says why there is no plan; empty if there is one.
        nodes: work of the solve, as in `Stop`; the work of OR-Tools is not counted.
        arenas: capacities in bytes of several arenas; () for a single arena.

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
    arenas: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.arenas:
            try:
                check_arenas(self.arenas)
            except ValueError as error:
                raise PlanError(str(error)) from None
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

    def in_arenas(self) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Return each instance's arena, int16[n, U], and offset within this arena in bytes, int64[n, U].

        Arena k begins at the offset ``k * stride_of(arenas)``. Both values are -1 for persistent buffers.

        Raises:
            PlanError: the plan has no offsets.
        """
        if self.offset is None:
            raise PlanError("a plan without offsets has nothing in its arenas")
        stride = stride_of(self.arenas) if self.arenas else 2**63 - 1
        arena = np.clip(self.offset // stride, -1, max(len(self.arenas) - 1, 0))
        local = np.where(self.offset < 0, -1, self.offset - arena * stride)
        return arena.astype(np.int16), local

    def keep(self, buffers: Buffers) -> Buffers:
        """Return the buffers with offsets fixed to this plan, so that a later solve keeps them in place.

        With several arenas, the later solve must have the same arena capacities.

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


def stride_of(arenas: Sequence[int]) -> int:
    """Return the distance between the starts of two arenas: the least power of two above all capacities."""
    return 1 << max(arenas).bit_length()


def check_arenas(arenas: Sequence[int]) -> None:
    """Check the capacities of several arenas.

    Raises:
        ValueError: no capacities or more than `MOST_ARENAS`, a capacity below 1, or more than
            `MOST_ADDRESSES` addresses in all.
    """
    if not 1 <= len(arenas) <= MOST_ARENAS:
        raise ValueError(f"{len(arenas)} arenas are not 1 to {MOST_ARENAS}")
    if min(arenas) < 1:
        raise ValueError(f"an arena of {min(arenas)} bytes holds nothing")
    if len(arenas) * stride_of(arenas) > MOST_ADDRESSES:
        raise ValueError(
            f"{len(arenas)} arenas of up to {max(arenas)} bytes are more than there are addresses"
        )

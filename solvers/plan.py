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
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from traces.buffers import Buffers

#: Work that a solver does when the caller sets no limit of any kind; a fraction of a second.
DEFAULT_NODES = 300_000_000
#: Several arenas, and the addresses of all together, are no more than these.
MOST_ARENAS, MOST_ADDRESSES = 256, 2**60


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
            In several arenas they count on from each to the next: see `in_arenas`.
        arena_bytes: size of the arena; 0 when there is no plan. Of several, bytes up to the end of each one's
            topmost buffer.
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
        arenas: capacities in bytes of the several arenas that it is for; () where there is one.

    Raises:
        PlanError: sizes that cannot be, or offsets of another shape.
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

    def in_arenas(self) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """In which arena each instance lies, int16[n, U], and how many bytes from its start, int64[n, U].

        Arena k begins at the offset ``k * stride_of(arenas)``. -1 and -1 for persistent buffers.

        Raises:
            PlanError: no offsets.
        """
        if self.offset is None:
            raise PlanError("a plan without offsets has nothing in its arenas")
        stride = stride_of(self.arenas) if self.arenas else 2**63 - 1
        arena = np.clip(self.offset // stride, -1, max(len(self.arenas) - 1, 0))
        local = np.where(self.offset < 0, -1, self.offset - arena * stride)
        return arena.astype(np.int16), local

    def keep(self, buffers: Buffers) -> Buffers:
        """The buffers with their offsets fixed to those of this plan; solved with others, they stay there.

        In several arenas they do when these have the same capacities.

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


def stride_of(arenas: Sequence[int]) -> int:
    """From the offset at which one of several arenas begins to the next: a power of two above all of them."""
    return 1 << max(arenas).bit_length()


def check_arenas(arenas: Sequence[int]) -> None:
    """Refuse capacities that arenas cannot have.

    Raises:
        ValueError: none at all, too many, one below 1, or absurdly many bytes.
    """
    if not 1 <= len(arenas) <= MOST_ARENAS:
        raise ValueError(f"{len(arenas)} arenas are not 1 to {MOST_ARENAS}")
    if min(arenas) < 1:
        raise ValueError(f"an arena of {min(arenas)} bytes holds nothing")
    if len(arenas) * stride_of(arenas) > MOST_ADDRESSES:
        raise ValueError(
            f"{len(arenas)} arenas of up to {max(arenas)} bytes are more than there are addresses"
        )

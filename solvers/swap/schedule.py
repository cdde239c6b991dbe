"""Schedule of offloads and reloads: moved buffers, and the operations at which copies begin and end."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.swap.replay import ReplayResult


@dataclass(frozen=True, eq=False)
class Schedule:
    """Table of moves, one row for each offload with its reload; and the resting buffers.

    The columns of moves are int64[q]. After operation ``out``, the program requests the copy to the host.
    Before operation ``release``, the program waits for this copy and frees the device memory. Before
    operation ``fetch``, the program allocates device memory and requests the copy to the device. Before
    operation ``use``, the program waits for this second copy. So the memory depends only on the order of
    operations; the speed of the link affects only the waits.

    The link makes the copies of one direction in the order of their requests; requests at the same operation
    are ordered by ``release`` or by ``use``, then by row. So the copy with the earliest wait is first, except
    for moves that began in different turns of a circle, since these numbers are relative to the turn of each
    move.

    Attributes:
        buffer: row of the buffer in the step.
        last: operation of the previous access, 0 <= last < K; last <= out < release < fetch <= use.
        out: operation after which the copy to the host is requested.
        release: operation before which the device memory is freed.
        fetch: operation before which the copy to the device is requested.
        use: operation of the next access; on a circle this may lie in the next turn, and be K or more.
        resting: rows in the step of persistent buffers that no operation accesses, and that are always on the
            host.
        copied: bool; False if the host copy is still valid, since the buffer was not written after the reload
            of its preceding absence. Then nothing is copied out.
    """

    buffer: NDArray[np.int64]
    last: NDArray[np.int64]
    out: NDArray[np.int64]
    release: NDArray[np.int64]
    fetch: NDArray[np.int64]
    use: NDArray[np.int64]
    copied: NDArray[np.bool_]
    resting: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        for name in (column.name for column in fields(self)):
            dtype = np.bool_ if name == "copied" else np.int64
            column: NDArray[Any] = np.ascontiguousarray(getattr(self, name), dtype).view()
            column.flags.writeable = False
            object.__setattr__(self, name, column)

    @classmethod
    def empty(cls) -> Schedule:
        """Return a schedule without moves."""
        none = np.empty(0, np.int64)
        return cls(none, none, none, none, none, none, none.astype(np.bool_))

    def __len__(self) -> int:
        return len(self.buffer)

    def select(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Schedule:
        """Return the given moves, with all resting buffers."""
        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        return Schedule(**{k: v if k == "resting" else v[rows] for k, v in columns.items()})


@dataclass(frozen=True, eq=False)
class PlannedSchedule:
    """A schedule for a limit, with the result of the replay.

    Attributes:
        limit_bytes: the requested limit.
        schedule: the moves.
        replayed: the result of replaying the schedule.
        method: the order of absences that led to the schedule, such as "early".
        predicted_stall: the native planner's prediction in seconds, without reuse of host copies.
    """

    limit_bytes: int
    schedule: Schedule
    replayed: ReplayResult
    method: str
    predicted_stall: float = float("inf")

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device."""
        return self.replayed.peak_bytes

    @property
    def stall_seconds(self) -> float:
        """Seconds that waits add to the step."""
        return self.replayed.stall_seconds

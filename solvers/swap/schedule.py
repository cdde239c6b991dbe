"""Schedule of offloads and reloads: the moved buffers and the operations at which copies begin and end."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.swap.replay import ReplayResult


@dataclass(frozen=True, eq=False)
class Schedule:
    """Table of moves, one row for each offload and reload of a buffer; and the resting buffers.

    The columns of moves are int64 and have q rows.

    After operation ``out``, the copy to the host is requested. Before operation ``release``, the program
    waits for this copy and frees the device memory. Before operation ``fetch``, device memory is allocated
    again and the copy to the device is requested. Before operation ``use``, the program waits for this second
    copy. So the memory depends on the order of operations alone, whatever the link does; the link decides
    only who waits.

    Copies of one direction are made in the order of their requests; requests at the same operation are
    ordered by ``release`` or by ``use``, then by row. So the copy that is waited for first is made first,
    except among moves that began in different turns of a circle: these numbers count from the turn of each
    move.

    Attributes:
        buffer: row of the buffer in the step.
        last: operation of the last access before, 0 <= last < K; last <= out < release < fetch <= use.
        out: operation after which the copy to the host is requested.
        release: operation before which the device memory is freed.
        fetch: operation before which the copy to the device is requested.
        use: operation of the next access; on a circle this may lie in the next turn, and be K or more.
        resting: rows in the step of persistent buffers that no operation accesses: on the host all the time,
            from before the first turn.
        copied: bool, False if the host still has the contents, because they were reloaded at the end of the
            preceding absence of the buffer and not written since. Then nothing is copied out.
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
        predicted_stall: the native planner's prediction in seconds, as if no host copy could be reused.
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
        """Seconds by which waiting lengthens the step."""
        return self.replayed.stall_seconds

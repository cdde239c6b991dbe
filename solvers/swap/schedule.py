"""What a swap schedule says: which buffers leave, when, and when they are back."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Schedule:
    """One row a move of one buffer out and back; int64 columns of q rows. And what is away all the time.

    When operation ``out`` has ended, the copy to the host is asked for. Before operation ``release`` begins,
    it is waited for, and the memory is given back. Before operation ``fetch`` begins, memory is taken again
    and the copy to the device is asked for. Before operation ``use`` begins, that is waited for. So memory is
    a matter of the operations' order alone, whatever the link does; the link decides who waits.

    Copies of one direction are made in the order in which they are asked for; at one operation, by
    ``release``, or by ``use``, then in the order of rows. So what is waited for first comes first, but for
    moves that began in different turns of a circle: these numbers count from the turn of each move.

    Attributes:
        buffer: row of the buffer in the step.
        last: operation of the last access before, 0 <= last < K; last <= out < release < fetch <= use.
        out: as above.
        release: as above.
        fetch: as above.
        use: operation of the next access; on a circle it may lie in the next turn, and be K or more.
        resting: rows in the step of persistent buffers that nothing accesses: on the host all the time, from
            before the first turn.
        copied: bool, False where the host still has the contents: they came from there at the end of the
            buffer's absence before this one, and nothing wrote since. Then nothing is copied out.
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
        for name in (one.name for one in fields(self)):
            dtype = np.bool_ if name == "copied" else np.int64
            column: NDArray[Any] = np.ascontiguousarray(getattr(self, name), dtype).view()
            column.flags.writeable = False
            object.__setattr__(self, name, column)

    @classmethod
    def empty(cls) -> Schedule:
        """Nothing moves."""
        none = np.empty(0, np.int64)
        return cls(none, none, none, none, none, none, none.astype(np.bool_))

    def __len__(self) -> int:
        return len(self.buffer)

    def select(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> Schedule:
        """Some of the moves; what rests does."""
        columns = {one.name: getattr(self, one.name) for one in fields(self)}
        return Schedule(**{k: v if k == "resting" else v[rows] for k, v in columns.items()})

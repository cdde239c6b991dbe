"""Schedule files: a schedule as JSON, with the identity of its step, and one row for each move."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from solvers.errors import PlanError
from solvers.swap.link import Link
from solvers.swap.schedule import Schedule
from solvers.swap.step_of_trace import step_of

if TYPE_CHECKING:
    from pathlib import Path

    from solvers.swap.step import Step
    from traces.trace import Trace

#: Largest size in bytes of a schedule file, and largest number in such a file.
_MOST_CHARACTERS, _MOST_NUMBER = 256 << 20, 2**62
_OPERATIONS = ("last", "out", "release", "fetch", "use")


@dataclass(frozen=True)
class StepSelection:
    """Selection of a step in a trace.

    Attributes:
        window: rows [first, end) of one iteration of a circle; None for all events on a line.
        bandwidth: bytes a second from which operation times are computed; None for the recorded times.
        device: the device, in a trace of several; None in a trace of one.
    """

    window: tuple[int, int] | None = None
    bandwidth: float | None = None
    device: int | None = None

    def step(self, trace: Trace) -> Step:
        """Return the selected step of a trace.

        Raises:
            PlanError, TraceError: the trace has no such step.
        """
        if self.bandwidth is not None and not 0 < self.bandwidth < float("inf"):
            raise PlanError(f"no bandwidth of {self.bandwidth} bytes a second")
        return step_of(trace, window=self.window, whole=self.window is None, bandwidth=self.bandwidth)


@dataclass(frozen=True, eq=False)
class StoredSchedule:
    """Contents of a schedule file. `schedule` compares them with a step; reading checks types alone.

    Attributes:
        selection: the step of the moves.
        link: the link that the moves were planned for.
        limit_bytes: the limit that the moves were planned for.
        operations: number of operations in the step.
        peak_bytes: peak load of the step.
        rows: the moves, as `move_rows` made them.
        resting: buffers that stay on the host all the time, as `resting_rows` made them.
    """

    selection: StepSelection
    link: Link
    limit_bytes: int
    operations: int
    peak_bytes: int
    rows: list[dict[str, Any]]
    resting: list[dict[str, Any]] = field(default_factory=list)

    def schedule(self, step: Step) -> Schedule:
        """Return the moves as a schedule of a step; `solvers.swap.replay` judges if the moves are possible.

        Raises:
            PlanError: the step is not the one that the moves were planned for.
        """
        if len(step) != self.operations or step.peak_bytes != self.peak_bytes:
            raise PlanError(
                f"moves of a step of {self.operations} operations and {self.peak_bytes} bytes at its peak, "
                f"not of this one of {len(step)} and {step.peak_bytes}"
            )
        rows = [*self.rows, *self.resting]
        buffer = np.array([row["row"] for row in rows], np.int64)
        ids = np.array([row["buffer"] for row in rows], np.int64)
        if (buffer >= len(step.size)).any() or (step.ids[buffer] != ids).any():
            raise PlanError("moves of buffers that the step does not have")
        buffer, resting = np.split(buffer, [len(self.rows)])
        columns = {
            name: np.array([row[f"{name}_operation"] for row in self.rows], np.int64) for name in _OPERATIONS
        }
        copied = np.array([row["copied"] for row in self.rows], np.bool_)
        return Schedule(buffer, **columns, copied=copied, resting=resting)


def move_rows(step: Step, schedule: Schedule, most: int | None = None) -> list[dict[str, Any]]:
    """Return the moves of a schedule as rows, the largest first; all if ``most`` is None."""
    s = schedule
    rows = sorted(range(len(s)), key=lambda row: (-int(step.size[s.buffer[row]]), int(s.last[row])))
    return [
        {
            "buffer": int(step.ids[s.buffer[row]]),
            "row": int(s.buffer[row]),
            "size_bytes": int(step.size[s.buffer[row]]),
            **{f"{name}_operation": int(getattr(s, name)[row]) for name in _OPERATIONS},
            "last_name": step.name(int(s.last[row])),
            "use_name": step.name(int(s.use[row])),
            "copied": bool(s.copied[row]),
        }
        for row in rows[:most]
    ]


def resting_rows(step: Step, schedule: Schedule) -> list[dict[str, Any]]:
    """Return the buffers that stay on the host all the time as rows, the largest first."""
    rows = sorted(schedule.resting.tolist(), key=lambda row: (-int(step.size[row]), row))
    return [{"buffer": int(step.ids[row]), "row": row, "size_bytes": int(step.size[row])} for row in rows]


def step_and_link_keys(selection: StepSelection, link: Link) -> dict[str, Any]:
    """Return the keys of a schedule file that identify step and link, ready for JSON."""
    return {"step": asdict(selection), "link": asdict(link)}


def read_schedule(path: Path) -> StoredSchedule:
    """Read a file that ``mempool swap -o`` wrote.

    Raises:
        PlanError: the file has another format.
        OSError: the file cannot be read.
    """
    if path.is_file() and path.stat().st_size > _MOST_CHARACTERS:
        raise PlanError(f"{path}: no moves of a schedule: of more than {_MOST_CHARACTERS} bytes")
    try:
        return _stored(json.loads(path.read_bytes()))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise PlanError(f"{path}: no moves of a schedule: {why}") from None


def _stored(content: Any) -> StoredSchedule:
    step, rows, resting = content["step"], content["moves"], content.get("resting", [])
    if not isinstance(rows, list) or not isinstance(resting, list):
        raise TypeError("moves are a list")
    for row in resting:
        _whole(row["buffer"]), _whole(row["row"])
    for row in rows:
        for name in ("buffer", "row", *(f"{name}_operation" for name in _OPERATIONS)):
            _whole(row[name])
        _typed(row["copied"], bool)
    window = step["window"]
    if window is not None:
        first, end = window
        window = _whole(first), _whole(end)
    bandwidth, device = step["bandwidth"], step["device"]
    numbers = {k: float(_typed(v, (int, float))) for k, v in content["link"].items() if k != "duplex"}
    return StoredSchedule(
        StepSelection(
            window,
            None if bandwidth is None else float(_typed(bandwidth, (int, float))),
            None if device is None else _whole(device, least=-1),
        ),
        Link(**numbers, duplex=_typed(content["link"]["duplex"], bool)),
        _whole(content["limits"][-1]["limit_bytes"]),
        _whole(content["operations"]),
        _whole(content["peak_load_bytes"]),
        rows,
        resting,
    )


def _typed(value: Any, types: type | tuple[type, ...]) -> Any:
    if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
        raise TypeError(f"{str(value)[:40]!r} where another kind of value belongs")
    return value


def _whole(value: Any, least: int = 0) -> int:
    """Return a whole number that fits a column."""
    number: int = _typed(value, int)
    if not least <= number < _MOST_NUMBER:
        raise ValueError(f"{str(number)[:40]} where a number from {least} to 2**62 belongs")
    return number

"""Contents of a schedule file: the identity of the step, and one row for each move."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from solvers.errors import PlanError
from solvers.swap.step_of_trace import step_of

if TYPE_CHECKING:
    from solvers.swap.link import Link
    from solvers.swap.schedule import Schedule
    from solvers.swap.step import Step
    from traces.trace import Trace

_OPERATIONS = ("last", "out", "release", "fetch", "use")


@dataclass(frozen=True)
class StepSelection:
    """Selection of a step in a trace.

    Attributes:
        window: rows [first, end) of one iteration of a circle; None for all events on a line.
        bandwidth: bytes per second for computed operation times; None for the recorded times.
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
    """Return the resting buffers as rows, the largest first."""
    rows = sorted(schedule.resting.tolist(), key=lambda row: (-int(step.size[row]), row))
    return [{"buffer": int(step.ids[row]), "row": row, "size_bytes": int(step.size[row])} for row in rows]


def step_and_link_keys(selection: StepSelection, link: Link) -> dict[str, Any]:
    """Return the keys of a schedule file that identify step and link, ready for JSON."""
    return {"step": asdict(selection), "link": asdict(link)}

"""Summary of a device's memory at the peak, from the other modules of this package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mempool.analysis.caveats import Refusals, refusals
from mempool.analysis.peak import Absences, Peak, absences, at_peak
from mempool.analysis.remedies import Remedy, ReservedEstimates, estimate_reserved, remedies
from solvers.simulators.recorded import recorded
from traces.completeness import completeness

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from solvers.simulators import Simulation
    from traces import Trace
    from traces.completeness import Completeness


@dataclass(frozen=True, eq=False)
class DeviceSummary:
    """The analysis of one device.

    Attributes:
        device: index of the device.
        trace: events of the device.
        rows: int64[n + 1], the row of each event in the original trace, and the original trace's length.
        iteration_events: length of an iteration, or of the whole trace without iterations.
        iterations: number of detected iterations; if 0, the roles of buffers are meaningless.
        peak: the buffers alive at the peak load.
        idle: absences at the peak, None if no accesses were recorded.
        recorded: simulation result of the recorded allocator, None if unknown.
        known: the recorded part of the device's history.
        refusals: the failed requests, None if none failed.
        estimates: simulations of the pool, a plan and settings, None if none was possible.
        remedies: remedies, the largest saving first.
    """

    device: int
    trace: Trace
    rows: NDArray[np.int64]
    iteration_events: int
    iterations: int
    peak: Peak
    idle: Absences | None
    recorded: Simulation | None
    known: Completeness
    refusals: Refusals | None
    estimates: ReservedEstimates | None
    remedies: list[Remedy]

    def row(self, event: int) -> int:
        """Return the row in the original trace of an event, or of the end of this device's events."""
        return int(self.rows[event])

    @property
    def stranded_bytes(self) -> int | None:
        """Return the unused reserved bytes at the recorded `fullest_event`; None if unknown."""
        if self.recorded is None:
            return None
        event = self.recorded.fullest_event
        return int(self.recorded.reserved[event] - self.recorded.live[event])


def summarize(
    trace: Trace, begins: NDArray[np.int64] | None = None, only: int | None = None
) -> Iterator[DeviceSummary]:
    """Analyse each device of a trace.

    Args:
        trace: the events.
        begins: rows at which iterations begin, int64[k]; None or empty without iterations.
        only: the only device to analyse; None for all.

    Raises:
        TraceError: the trace contradicts itself.
    """
    begins = np.empty(0, np.int64) if begins is None else begins
    for device in trace.devices if only is None else (only,):
        rows = trace.rows_on_device(device)
        own_begins = np.searchsorted(rows, begins)  # as rows of the device's events
        events = trace if len(rows) == len(trace) else trace.on_device(device)
        peak = at_peak(events, own_begins)
        idle, allocator, known = absences(events, peak), recorded(events), completeness(trace, device)
        iteration = int(np.median(np.diff(own_begins))) if len(own_begins) > 1 else len(events)
        simulated = estimate_reserved(events, allocator, known)
        unused = None
        if allocator is not None and simulated is None and known.is_whole:
            unused = allocator.peak_reserved_bytes - peak.bytes
        yield DeviceSummary(
            device,
            events,
            np.append(rows, len(trace)),
            iteration,
            len(own_begins),
            peak,
            idle,
            allocator,
            known,
            refusals(events),
            simulated,
            remedies(peak, idle, unused, iteration, simulated.remedies if simulated else ()),
        )

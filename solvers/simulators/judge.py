"""Comparison of a simulation of PyTorch's allocator with a recording of the real allocator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from solvers import _core
from solvers.simulators.first_state import recording
from solvers.simulators.native import course_of
from solvers.simulators.pytorch import PyTorch
from solvers.simulators.pytorch_conf import recorded_settings
from solvers.simulators.simulate import simulation_of
from traces.trace import EventType
from traces.transforms import pools_as_streams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.simulators.first_state import FirstState, Recording
    from solvers.simulators.simulation import Course, Simulation
    from traces.trace import Trace


#: Most corrections of the first state by the recorded addresses of later buffers.
_PASSES = 12


@dataclass(frozen=True, eq=False)
class Judgement:
    """A simulation compared with the recording of the same events.

    Attributes:
        simulation: the simulation, from the first state of the recording, with the device's recorded
            addresses.
        begin: the first recorded event; rows before it describe the first state.
        segments: number of recorded reservations.
        segments_alike: number of these for which the simulation reserved the same size at the same event.
        segments_simulated: number of simulated reservations.
        allocs: number of recorded allocs of at least a byte.
        addresses_alike: number of these at the same address in the simulation.
        events: number of recorded allocs and frees.
        reserved_alike: number of these after which the simulation holds equally many bytes.
        first_difference: request and address of the first alloc with another address; empty if all are equal.
    """

    simulation: Simulation
    begin: int
    segments: int
    segments_alike: int
    segments_simulated: int
    allocs: int
    addresses_alike: int
    events: int
    reserved_alike: int
    first_difference: str

    @property
    def exact(self) -> bool:
        """True if all segments, addresses and reserved bytes are those of the recording."""
        return (
            self.segments == self.segments_alike == self.segments_simulated
            and self.allocs == self.addresses_alike
            and self.events == self.reserved_alike
        )


def judge(trace: Trace, **parameters: Any) -> Judgement:
    """Simulate ``pytorch`` from the beginning of a recording of the real allocator, and compare.

    The first state (segments, buffers, and the free blocks between them) is inferred from the recording;
    later allocations settle the block ends that remain ambiguous. A simulated reservation gets the address of
    the next recorded reservation of that size, since the choice among several free blocks of one size depends
    on their addresses. Recorded releases are repeated: the program requested them (``empty_cache``), or the
    device ran out of memory, which the recording does not tell.

    Args:
        trace: a recording of one device with addresses and `EventType.RESERVE` rows, as of `read_snapshot`.
        **parameters: settings of the recorded allocator, fields of `PyTorch`; missing ones are taken from the
            trace's metadata, if present.

    Raises:
        ValueError: a trace of several devices, without a reservation, or of expandable segments, whose first
            state a recording does not tell; a setting out of range.
        TraceError: the trace contradicts itself.
    """
    if not (trace.kind == EventType.RESERVE).any():
        raise ValueError("a trace that does not tell what its allocator reserved")
    if trace.metadata.get("expandable", "0") == "1":
        raise ValueError("a recording of expandable segments cannot be judged")
    if len(trace.devices) > 1:
        raise ValueError("a trace of several devices; judge each by itself")
    trace = pools_as_streams(trace)
    settings = PyTorch(**recorded_settings(trace.metadata) | parameters)
    rules = settings.rules()
    truth = recording(trace, rules)
    state = truth.first_state(rules)
    for _ in range(_PASSES if state.slack.any() else 0):
        _, allocator, handles = _run(state, rules, learning=True)
        if not state.learn(allocator, handles):
            break
    course, _, handles = _run(state, rules, learning=False)
    course.address[: truth.begin] = np.where(handles >= 0, trace.address[: truth.begin], -1)
    return _compared(truth, simulation_of(trace, "pytorch", settings, course))


def _run(
    state: FirstState, rules: _core.PyTorchRules, *, learning: bool
) -> tuple[Course, _core.SimulatedPyTorch, NDArray[np.int64]]:
    """Return the course of a recording from the first state on, the allocator, and that state's handles."""
    truth = state.recording
    trace = truth.trace
    device = _core.SimulatedDevice(_core.LARGEST_DEVICE, truth.floor)
    for row in truth.reserves.tolist():
        device.answer(int(trace.size[row]), int(trace.address[row]))
    allocator = _core.SimulatedPyTorch(device, rules)
    handles = state.adopt(allocator, learning=learning)
    return course_of(trace, device, allocator, handles, give_back=True), allocator, handles


def _compared(truth: Recording, simulation: Simulation) -> Judgement:
    trace, begin = truth.trace, truth.begin
    rows = np.arange(len(trace)) >= begin
    allocs = np.flatnonzero(rows & (trace.kind == EventType.ALLOC) & (trace.size > 0))
    events = np.flatnonzero(rows & ((trace.kind == EventType.ALLOC) | (trace.kind == EventType.FREE)))
    alike = simulation.address[allocs] == trace.address[allocs]
    segments = simulation.segments
    made = segments.start >= begin
    # A reservation made for an alloc is recorded just before this alloc.
    after = np.append(events, len(trace))[np.searchsorted(events, truth.reserves)]
    ours = set(zip(segments.start[made].tolist(), segments.size[made].tolist(), strict=True))
    theirs = zip(after.tolist(), trace.size[truth.reserves].tolist(), strict=True)
    return Judgement(
        simulation=simulation,
        begin=begin,
        segments=len(truth.reserves),
        segments_alike=sum(pair in ours for pair in theirs),
        segments_simulated=int(made.sum()),
        allocs=len(allocs),
        addresses_alike=int(alike.sum()),
        events=len(events),
        reserved_alike=int((simulation.reserved[events] == truth.reserved[events]).sum()),
        first_difference=_difference(simulation, allocs[~alike]),
    )


def _difference(simulation: Simulation, rows: NDArray[np.int64]) -> str:
    if not len(rows):
        return ""
    row, trace = int(rows[0]), simulation.trace
    return (
        f"event {row}: {trace.size[row]} bytes at {trace.address[row]:#x}, "
        f"simulated at {simulation.address[row]:#x}"
    )

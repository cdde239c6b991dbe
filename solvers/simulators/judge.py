"""How far a simulation of PyTorch's allocator agrees with what it did in truth, as a recording tells it."""

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
from traces.private_pools import pools_as_streams
from traces.trace import Kind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.simulators.first_state import FirstState, Recording
    from solvers.simulators.simulation import Course, Simulation
    from traces.trace import Trace


#: How often the first state may be corrected by what was put elsewhere in truth.
_PASSES = 12


@dataclass(frozen=True, eq=False)
class Judgement:
    """A simulation beside the recording of the same events.

    Attributes:
        simulation: from the first state of the recording, with the addresses that the device gave in truth.
        begin: the first event that was recorded; rows before it tell what was there.
        segments: reservations that were recorded.
        segments_alike: of them, those of the same size that the simulation made at the same event.
        segments_simulated: reservations that the simulation made.
        allocs: allocs that were recorded, of at least a byte.
        addresses_alike: of them, those that the simulation put at the same address.
        events: allocs and frees that were recorded.
        reserved_alike: of them, those after which as much was held.
        first_difference: what the first alloc with another address asked for and got; empty if there is none.
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
        """Whether all segments, addresses and reserved bytes are those of the recording."""
        return (
            self.segments == self.segments_alike == self.segments_simulated
            and self.allocs == self.addresses_alike
            and self.events == self.reserved_alike
        )


def judge(trace: Trace, **parameters: Any) -> Judgement:
    """Simulate ``pytorch`` from where a recording of it began, and compare.

    The first state (segments, buffers, and the free blocks between them) is inferred from the recording;
    what is left open, by what is put there later, and what is not. A simulated reservation gets the address
    of the recorded one of that size that is next in order, since which of several free blocks of one size is
    taken depends on their addresses. What was given back is given back: a program asked for that
    (``empty_cache``), or a device had no more, which the recording does not tell.

    Args:
        trace: a recording of one device with addresses and `Kind.RESERVE` rows, as `read_snapshot` gives it.
        **parameters: settings of the recorded allocator, as of `PyTorch`; those that are not given are taken
            from the trace's metadata, where it has them.

    Raises:
        ValueError: a trace of several devices, without a reservation, or of expandable segments, whose first
            state a recording does not tell; a setting out of range.
        TraceError: the trace contradicts itself.
    """
    if not (trace.kind == Kind.RESERVE).any():
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
    """The course of a recording from its first state; the allocator, and the handles of that state."""
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
    allocs = np.flatnonzero(rows & (trace.kind == Kind.ALLOC) & (trace.size > 0))
    events = np.flatnonzero(rows & ((trace.kind == Kind.ALLOC) | (trace.kind == Kind.FREE)))
    alike = simulation.address[allocs] == trace.address[allocs]
    segments = simulation.segments
    made = segments.start >= begin
    # What is reserved for an alloc is recorded just before it.
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

"""Comparison of a simulation of PyTorch's allocator with a recording of the real allocator.

The first state of the recorded allocator is inferred from the recording.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from solvers import _core
from solvers.simulators.allocator import course_of
from solvers.simulators.pytorch import PyTorch, recorded_settings
from solvers.simulators.simulate import simulation_of
from traces.errors import TraceError
from traces.trace import EventType
from traces.transforms import pools_as_streams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.simulators.simulation import Course, Simulation
    from traces.trace import Trace

#: Largest address and largest segment size of any device, in bytes.
_LARGEST_ADDRESS = 1 << 55
#: Largest segment, in bytes, of the small pool, whose blocks are always split.
_SMALL_SEGMENT = 2 << 20
#: Largest remainder, in bytes, that the large pool does not split off; so no free block is so small.
_LARGEST_REST = 1 << 20


@dataclass(frozen=True, eq=False)
class Recording:
    """A recording of PyTorch's allocator, and the row of the beginning.

    Attributes:
        trace: the whole trace.
        begin: rows before this one describe the first state: segments, then the buffers in them.
    """

    trace: Trace
    begin: int

    @property
    def reserves(self) -> NDArray[np.int64]:
        """Rows of the recorded reservations."""
        return self.begin + np.flatnonzero(self.trace.kind[self.begin :] == EventType.RESERVE)

    @property
    def floor(self) -> int:
        """End of all memory in the trace, as an address."""
        rows = self.trace.kind == EventType.RESERVE
        return int((self.trace.address[rows] + self.trace.size[rows]).max(initial=0))

    @property
    def reserved(self) -> NDArray[np.int64]:
        """Bytes held from the device after each event, int64[events]."""
        kind, size = self.trace.kind, self.trace.size
        return np.cumsum(
            np.where(kind == EventType.RESERVE, size, np.where(kind == EventType.RELEASE, -size, 0))
        )

    def first_state(self, rules: _core.PyTorchRules) -> FirstState:
        """Return the segments and blocks in use when the recording began.

        Raises:
            TraceError: segments that overlap.
        """
        trace = self.trace
        segments = self._first(EventType.RESERVE)
        low = trace.address[segments]
        high = low + trace.size[segments]
        if (overlap := high[:-1] > low[1:]).any():
            raise TraceError("a segment on top of another", row=int(segments[1:][overlap][0]))
        return FirstState(self, segments, *self._blocks(low, high, rules))

    def _first(self, kind: EventType) -> NDArray[np.int64]:
        """Return the rows of a kind that describe the first state, by address."""
        rows = np.flatnonzero((self.trace.kind[: self.begin] == kind) & (self.trace.size[: self.begin] > 0))
        return rows[np.argsort(self.trace.address[rows], kind="stable")]

    def _blocks(
        self, low: NDArray[np.int64], high: NDArray[np.int64], rules: _core.PyTorchRules
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the buffers in segments [low, high), the end of each one's block, and the slack.

        A remainder too small to be split off belongs to the block before it. If more is free behind the
        block, the size of this remainder is ambiguous: the first buffer put there while the one before lives
        settles the size. The slack is the number of bytes by which the block may end later.
        """
        trace = self.trace
        buffers = self._first(EventType.ALLOC)
        within = np.searchsorted(low, trace.address[buffers], side="right") - 1
        inside = (within >= 0) & (trace.address[buffers] < np.append(high, 0)[within])
        buffers, within = buffers[inside], within[inside]
        at = trace.address[buffers]
        room = np.minimum(np.append(at[1:], _LARGEST_ADDRESS * 2)[: len(at)], high[within])
        alone = room > at
        buffers, at, room, large = buffers[alone], at[alone], room[alone], (high - low)[within][alone]
        sizes = [rules.rounded(min(size, _LARGEST_ADDRESS)) for size in trace.size[buffers].tolist()]
        ends = np.minimum(at + np.array(sizes, np.int64), room)
        rest = np.where(large > _SMALL_SEGMENT, room - ends, 0)
        slack = np.clip(rest - _LARGEST_REST - 512, 0, _LARGEST_REST)
        self._open(buffers, ends, slack)
        return buffers, np.where((rest > 0) & (rest <= _LARGEST_REST), room, ends), slack

    def _open(self, buffers: NDArray[np.int64], ends: NDArray[np.int64], slack: NDArray[np.int64]) -> None:
        """Move ambiguous ends to the address of a later buffer, which shows where the free block begins."""
        trace = self.trace
        freed = np.full(len(trace), len(trace))
        frees = np.flatnonzero(trace.kind == EventType.FREE)
        freed[trace.births[frees]] = frees
        rows = self.begin + np.flatnonzero(trace.kind[self.begin :] == EventType.ALLOC)
        rows = rows[np.argsort(trace.address[rows], kind="stable")]
        address = trace.address[rows]
        for k in np.flatnonzero(slack).tolist():
            near = slice(*np.searchsorted(address, [ends[k], ends[k] + slack[k] + 1]))
            first = int(rows[near].min(initial=len(trace)))
            if first < freed[buffers[k]]:
                ends[k], slack[k] = trace.address[first], 0


@dataclass(frozen=True, eq=False)
class FirstState:
    """Segments and blocks in use; rows of the trace, by address.

    Attributes:
        recording: the recording from which the state was inferred.
        segments: int64[segments], rows.
        buffers: int64[blocks], rows.
        ends: int64[blocks], the address at which each block ends.
        slack: int64[blocks], bytes by which each block may end later.
    """

    recording: Recording
    segments: NDArray[np.int64]
    buffers: NDArray[np.int64]
    ends: NDArray[np.int64]
    slack: NDArray[np.int64]

    def adopt(self, allocator: _core.SimulatedPyTorch, *, learning: bool) -> NDArray[np.int64]:
        """Put this state into a new allocator; return the handles of the state's rows, else -1."""
        trace = self.recording.trace
        handles = np.full(self.recording.begin, -1, np.int64)
        at = trace.address[self.buffers]
        slack = self.slack if learning else np.zeros_like(self.slack)
        for row in self.segments.tolist():
            begin, size = int(trace.address[row]), int(trace.size[row])
            inside = slice(*np.searchsorted(at, [begin, begin + size]))
            blocks = at[inside], self.ends[inside] - at[inside], slack[inside]
            handles[self.buffers[inside]] = allocator.adopt(begin, size, int(trace.stream[row]), *blocks)
        return handles

    def learn(self, allocator: _core.SimulatedPyTorch, handles: NDArray[np.int64]) -> bool:
        """Move ends to the addresses that the allocator with this state needed; return true if any moved."""
        moved, ends = allocator.learned()
        which = np.full(int(handles.max(initial=-1)) + 1, -1, np.int64)
        which[handles[self.buffers]] = np.arange(len(self.buffers))
        for handle, end in zip(moved.tolist(), ends.tolist(), strict=True):
            k = which[handle]
            self.slack[k] -= end - self.ends[k]
            self.ends[k] = end
        return len(moved) > 0


def recording(trace: Trace, rules: _core.PyTorchRules) -> Recording:
    """Find the beginning of a recording: readers put the first state first, at the time of the first event.

    Raises:
        TraceError: the trace contradicts itself, or has memory at addresses that no device has.
    """
    _ = trace.births
    reserves = trace.kind == EventType.RESERVE
    largest = np.maximum(trace.address, trace.size)
    wrong = reserves & ((trace.address < 0) | (trace.size == 0) | (largest > _LARGEST_ADDRESS))
    if wrong.any():
        raise TraceError("memory that no device has", row=int(wrong.argmax()))
    return Recording(trace, 0 if _from_nothing(trace, rules) else _begin(trace))


def _from_nothing(trace: Trace, rules: _core.PyTorchRules) -> bool:
    """Return true if the first segment is the one that an empty allocator reserves for the first alloc."""
    first = (
        trace.kind[:2].tolist() == [EventType.RESERVE, EventType.ALLOC]
        and trace.address[0] == trace.address[1]
    )
    size = min(int(trace.size[1]), _LARGEST_ADDRESS) if first else 0
    nothing = trace.metadata.get("alive_before", "0") == "0"
    return first and nothing and rules.segment_for(rules.rounded(size)) == int(trace.size[0])


def _begin(trace: Trace) -> int:
    """Return the length of the initial run of segments, then buffers, at the time of the first event."""
    at_once = _initial_run(trace.time_ns == trace.time_ns[:1])
    segments = _initial_run(trace.kind[:at_once] == EventType.RESERVE)
    text = trace.metadata.get("alive_before", "0")
    before = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0
    return segments + _initial_run(trace.kind[segments : min(segments + before, at_once)] == EventType.ALLOC)


def _initial_run(holds: NDArray[np.bool_]) -> int:
    """Return the number of rows, from the first on, for which ``holds`` is true without a gap."""
    return int(np.append(holds, False).argmin())


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

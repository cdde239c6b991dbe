"""Reader of traces of PyTorch's profiler (Kineto), in Chrome's format.

Instants named ``[memory]`` are allocs, or with negative ``Bytes`` frees (PyTorch,
torch/csrc/autograd/profiler_kineto.cpp); the profiler writes them with ``profile_memory=True``. The operation
of each event is the innermost operator around the event on its thread, the source line that of the innermost
function outside of libraries, if ``with_stack=True`` recorded functions. A file is not sorted by time, so the
events are collected as numbers, some 110 bytes each, and sorted.

Memory from before the recording has no events, but each event holds the allocator's totals. The difference to
the sum of the events becomes one buffer of unlimited lifetime, and changes of the reserved bytes become
segments at unknown addresses.
"""

from __future__ import annotations

import dataclasses
import re
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from traces._core import is_library_file
from traces.columns import LARGEST, MAX_EVENTS
from traces.completeness import History
from traces.errors import TraceError
from traces.formats.json_events import trace_events
from traces.formats.logs import Log, number, read_log, refused_size
from traces.intervals import innermost

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator

    from _typeshed import StrPath
    from numpy.typing import NDArray

    from traces.formats.text_files import Head
    from traces.trace import Trace

KNOWN = {"framework": "pytorch", "recorder": "profiler"}
#: c10::DeviceType of host memory, and the trace's device index for the host; other devices have indices from
#: 0.
CPU, HOST = 0, -1
#: Address rounding of c10's allocators, on the host and on devices, in bytes.
_HOST_ALIGNMENT, _DEVICE_ALIGNMENT = 64, 512
_OPERATORS = ("cpu_op", "Operator")
_FUNCTIONS = ("python_function", "Python")
#: Categories of a step; early releases call a step an operator. ``gpu_user_annotation`` repeats the step on
#: the GPU's track.
_STEPS = ("user_annotation", *_OPERATORS)
#: ``FILE(LINE): FUNCTION``; LINE is the function's first.
_FUNCTION = re.compile(r"(.*\.py)\((\d+)\): ")
_JSON = re.compile(rb'\s*(?:\{\s*"|\[\s*\{)')
#: The operation of the buffer that stands for memory from before the recording.
BEFORE = "allocated before the recording"
WRONG_TIME = "a time that contradicts the order of the events"
WRONG_TOTAL = "'Total Reserved' is less than 'Total Allocated'"
#: Reasons for which a lenient reader corrects a field of an event instead of omitting the event.
CORRECTED = frozenset({WRONG_TIME, WRONG_TOTAL})
#: Columns of an event while a file is read; ``order`` is the profiler's event index, -1 where unknown.
_MEMORY = ("time", "thread", "device", "address", "size", "row", "kind", "order", "allocated", "reserved")
_EVENT, _REFUSED, _STEP = range(3)
_SECOND = 10**9  # ns
_MOST_NAMES, _NAME_CHARS = 1 << 20, 200
_MOST_DEVICES = 1 << 16
_ROWS = 1 << 16  # rows converted to Python's numbers at a time


def read_chrome(
    path: StrPath,
    *,
    skipped: Counter[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Trace:
    """Read a profiler's trace, every device, with addresses, threads, operations and source lines.

    Memory of the host is device -1, whose history is a window, since the memory in use before the recording
    is unknown. A profiler's step (``ProfilerStep#N``) is a mark. Streams are not known. Source lines are file
    name and first line of the function, without folders. Metadata: ``framework``, ``recorder``,
    ``alignment``, ``alive_before`` (number of buffers from before the recording), the keys of
    `traces.completeness` and, for memory other than the host's, ``device_type``, PyTorch's number.

    Args:
        path: the file, plain or compressed by gzip.
        skipped: receives the counts of invalid events, which are left out or `CORRECTED`, by reason; None:
            the first is an error.
        progress: as of `traces.read.read`.

    Raises:
        TraceError: naming the file and, as row, the index of the event: not such a trace, a trace without
            memory events, a field that is no number, memory that is allocated again without a free, a time
            that contradicts the order of its thread's events (``Ev Idx``, or times that are lost: all 0).
        OSError: the file cannot be read.
    """
    trace = read_log(path, _fill, KNOWN, skipped, progress)
    if HOST not in trace.devices:
        return trace
    # The host's totals start with the profiler, and do not include earlier memory.
    return dataclasses.replace(trace, metadata={**trace.metadata, f"history.{HOST}": str(History.WINDOW)})


def is_json(head: Head) -> bool:
    """Return true for the beginning of a JSON object, or of a list of objects."""
    return _JSON.match(head.text) is not None


def _fill(path: StrPath, log: Log) -> Iterator[None]:
    seen = _Seen(log)
    for row, event in enumerate(trace_events(path, log.skipped, log.progress)):
        if row >= MAX_EVENTS:
            raise TraceError(f"more than {MAX_EVENTS} events, the most read at once")
        try:
            seen.add(event, row)
        except TraceError as error:
            log.reject(error, row)
    yield from seen.tell()


@dataclass
class _Seen:
    """The relevant events of a file, as numbers.

    ``memory``: rows of `_MEMORY`, one per memory event, refused request and beginning of a step.
    ``operators`` and ``functions``: rows of (start, end, thread, name). Times are in ns.
    """

    log: Log
    memory: array[int] = field(default_factory=lambda: array("q"))
    operators: array[int] = field(default_factory=lambda: array("q"))
    functions: array[int] = field(default_factory=lambda: array("q"))
    names: dict[str, int] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def add(self, event: Any, row: int) -> None:
        if type(event) is not dict:
            raise TraceError("not an object")
        name, phase, category = event.get("name"), event.get("ph"), event.get("cat")
        if type(name) is not str:
            return
        if phase == "X" and category in _STEPS and name.startswith("ProfilerStep#"):
            self.memory.extend((_time(event), self._thread(event), 0, 0, 0, row, _STEP, -1, 0, 0))
        elif phase == "X" and category in _OPERATORS:
            self._add_operator(event, name)
        elif phase == "X" and category in _FUNCTIONS:
            if (line := self._line(name)) >= 0:
                self.functions.extend(self._span(event, line))
        elif name == "[memory]":
            self._add_memory(event, row)
        elif name == "[OutOfMemory]":
            self._add_refused(event, row)

    def _add_operator(self, event: dict[str, Any], name: str) -> None:
        self.operators.extend(self._span(event, self._name(name)))
        told = event.get("args")
        stack = told.get("Call stack") if type(told) is dict else None
        if type(stack) is str:  # early releases: one text per operator, the innermost function first
            line = next((line for name in stack.split(";") if (line := self._line(name.strip())) >= 0), -1)
            self.functions.extend(self._span(event, line))

    def _add_memory(self, event: dict[str, Any], row: int) -> None:
        told = event.get("args")
        if type(told) is not dict or "Addr" not in told:
            raise TraceError(
                "a memory event without an address ('Addr'), as early releases of PyTorch write them"
            )
        size = _integer(told, "Bytes")
        number(abs(size), "Bytes")
        if size:
            where = (_time(event), self._thread(event), self._device(told))
            totals = (_total(told, "Total Allocated"), _total(told, "Total Reserved"))
            order = told.get("Ev Idx")
            order = order if type(order) is int and 0 <= order <= LARGEST else -1
            address = number(_integer(told, "Addr"), "Addr")
            self.memory.extend((*where, address, size, row, _EVENT, order, *totals))

    def _add_refused(self, event: dict[str, Any], row: int) -> None:
        told = event.get("args")
        if type(told) is not dict:
            raise TraceError("an out-of-memory event without fields")
        size = refused_size(told.get("Bytes"))
        device = self._device(told) if "Device Type" in told else HOST
        self.memory.extend((_time(event), self._thread(event), device, 0, size, row, _REFUSED, -1, 0, 0))

    def _device(self, told: dict[str, Any]) -> int:
        kind, index = _integer(told, "Device Type"), _integer(told, "Device Id")
        if kind == CPU:
            return HOST
        if not 0 <= index < _MOST_DEVICES:
            raise TraceError(f"no device: {index}")
        if self.log.said.setdefault("device_type", kind) != kind:
            raise TraceError(f"more than one type of device: {str(kind)[:20]}")
        return index

    def _thread(self, event: dict[str, Any]) -> int:
        name = (event.get("pid"), event.get("tid"))
        if not all(isinstance(part, (int, str)) for part in name):
            raise TraceError("an event without a thread")
        return self.log.thread(name)

    def _span(self, event: dict[str, Any], name: int) -> tuple[int, int, int, int]:
        start, length = _time(event), event.get("dur")
        if not isinstance(length, (int, float)) or not length > 0:  # a span without end contains no event
            length = 0
        end = start + round(min(length, LARGEST // 1000) * 1000)
        return start, min(end, LARGEST), self._thread(event), name

    def _name(self, text: str) -> int:
        if len(self.names) >= _MOST_NAMES and text not in self.names:
            return -1
        return self.names.setdefault(text[:_NAME_CHARS], len(self.names))

    def _line(self, function: str) -> int:
        if (known := self.lines.get(function)) is not None:
            return known
        found = _FUNCTION.match(function)
        path = "" if found is None else found[1].replace("\\", "/")
        known = found is not None and not is_library_file(path)
        line = self._name(f"{path.rpartition('/')[2]}:{found[2]}") if found is not None and known else -1
        if len(self.lines) < _MOST_NAMES:
            self.lines[function] = line
        return line

    def tell(self) -> Iterator[None]:
        """Add the memory events to the log in the order of their times."""
        log, memory = self.log, np.asarray(self.memory, np.int64).reshape(-1, len(_MEMORY))
        if not (memory[:, _MEMORY.index("kind")] == _EVENT).any():
            raise TraceError(
                "no memory events: record with profile_memory=True, as in torch.profiler.profile"
            )
        memory = self._in_order(memory)
        self._check_totals(memory)
        kind = memory[:, _MEMORY.index("kind")]
        on_host = bool((memory[kind != _STEP, _MEMORY.index("device")] == HOST).any())
        log.said["alignment"] = _HOST_ALIGNMENT if on_host else _DEVICE_ALIGNMENT
        totals = _Totals(memory)
        before = self._name(BEFORE) if totals.before else -1
        log.names = tuple(self.names)
        operation, frame = _around(memory, self.operators), _around(memory, self.functions)
        for first in range(0, len(memory), _ROWS):
            rows = slice(first, first + _ROWS)
            table = np.column_stack(
                [memory[rows], totals.reserved_change[rows], operation[rows], frame[rows]]
            )
            for row in table.tolist():
                self._tell_row(row)
                yield
        live = log.live_before()
        for device, (allocated, reserved) in totals.before.items():
            log.base(device, allocated - live[device], reserved, before)

    def _tell_row(self, values: list[int]) -> None:
        """Add a row of `_MEMORY` to the log, with the change of the reserved bytes, operation and frame."""
        time, thread, device, address, size, row, kind, _, _, _, change, *named = values
        where = (0, thread, time, *named)
        try:
            if kind == _STEP:
                self.log.mark(thread, time)
            elif kind == _REFUSED:
                self.log.refused(device, size, *where)
            else:
                if change > 0:
                    self.log.reserve(device, -1, change, *where)
                elif change < 0:
                    self.log.release(device, -change, *where)
                (self.log.alloc if size > 0 else self.log.free)(device, address, abs(size), *where)
        except TraceError as error:
            self.log.reject(error, row)

    def _check_totals(self, memory: NDArray[np.int64]) -> None:
        """Reject events whose allocator reserves less than it allocated.

        A lenient reader corrects the total.
        """
        allocated, reserved = (memory[:, _MEMORY.index(name)] for name in ("allocated", "reserved"))
        wrong = (reserved > 0) & (reserved < allocated)
        for row in memory[wrong, _MEMORY.index("row")].tolist():
            self.log.reject(TraceError(WRONG_TOTAL), row)
        memory[wrong, _MEMORY.index("reserved")] = allocated[wrong]

    def _in_order(self, memory: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sort rows by their times, and reject times that contradict the order in which events happened."""
        lost = self._lost_times(memory)
        for row in memory[lost, _MEMORY.index("row")].tolist():
            self.log.reject(TraceError(WRONG_TIME), row)
        # A lenient reader uses the order of the file instead: an event gets the time of its thread's previous
        # event.
        time, thread = np.where(lost, 0, memory[:, 0]), memory[:, _MEMORY.index("thread")]
        memory[:, 0] = np.where(lost, _latest_so_far(time, thread), memory[:, 0])
        return memory[np.argsort(memory[:, 0], kind="stable")]

    @staticmethod
    def _lost_times(memory: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the times that are impossible, bool[n].

        A time is impossible if an event of the same thread with a smaller index has a later time. A time of 0
        is impossible if other times are 0 too and all later times begin after a gap that is longer than the
        recording. Indices order the events of one thread only: the profiler numbers one thread after the
        other.
        """
        time, order, thread = (memory[:, _MEMORY.index(name)] for name in ("time", "order", "thread"))
        lost = np.zeros(len(memory), np.bool_)
        indexed = np.flatnonzero(order >= 0)
        rows = indexed[np.argsort(order[indexed], kind="stable")]
        if (np.diff(order[rows]) > 0).all():  # duplicate indices give no order
            lost[rows] = time[rows] < _latest_so_far(time[rows], thread[rows])
        zero, known = (time == 0) & (memory[:, _MEMORY.index("kind")] == _EVENT), time[time > 0]
        if zero.sum() > 1 and len(known) and known.min() > max(np.ptp(known), _SECOND):
            lost |= zero
        return lost


class _Totals:
    """Bytes held according to the allocator of each device, compared with the sum of the events.

    Attributes:
        before: for each device the bytes allocated and reserved before the first event.
        reserved_change: int64[n], growth of the reserved bytes at each row of memory.
    """

    def __init__(self, memory: NDArray[np.int64]) -> None:
        self.before: dict[int, tuple[int, int]] = {}
        self.reserved_change = np.zeros(len(memory), np.int64)
        columns = (
            memory[:, _MEMORY.index(name)] for name in ("device", "size", "kind", "allocated", "reserved")
        )
        device, size, kind, allocated, reserved = columns
        for index in np.unique(device[kind == _EVENT]).tolist():
            rows = np.flatnonzero((device == index) & (kind == _EVENT))
            known = bool(allocated[rows].any())
            if not known and not reserved[rows].any():  # an allocator without totals
                continue
            # Threads may report in another order than they allocate, so totals may be wrong briefly.
            base = max(int(np.median(allocated[rows] - np.cumsum(size[rows]))), 0) if known else 0
            # With no earlier allocation, the first event's segment was reserved for that event.
            first = 0 if known and not base else int(reserved[rows[0]])
            self.reserved_change[rows] = np.diff(reserved[rows], prepend=first)
            self.before[index] = base, first


def _latest_so_far(time: NDArray[np.int64], thread: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the latest time among each row and the earlier rows of the same thread, int64[n]."""
    values, rank = np.unique(time, return_inverse=True)
    _, group = np.unique(thread, return_inverse=True)
    rows = np.argsort(group, kind="stable")
    # The ranks of each thread exceed the ranks of all previous threads, so one pass serves all threads.
    ranks = np.maximum.accumulate(group[rows] * len(values) + rank[rows])
    latest = np.empty_like(time)
    latest[rows] = values[ranks % max(len(values), 1)]
    return latest


def _around(memory: NDArray[np.int64], spans: array[int]) -> NDArray[np.int64]:
    """Return the innermost span's name around each memory event on the same thread, -1 if there is none."""
    start, end, thread, name = np.asarray(spans, np.int64).reshape(-1, 4).T
    found = innermost(start, end, thread, memory[:, 0], memory[:, 1])
    return np.append(name, -1)[found]


def _time(event: dict[str, Any]) -> int:
    """Return the time of an event in ns; the JSON has microseconds."""
    value = event.get("ts")
    if isinstance(value, (int, float)) and 0 <= value <= LARGEST // 1000:  # false for NaN
        return round(value * 1000)
    raise TraceError(f"not a time: ts {str(value)[:40]!r}")


def _total(told: dict[str, Any], name: str) -> int:
    """Return a total in bytes; 0 if the field is missing or no valid number."""
    value = told.get(name)
    return value if type(value) is int and 0 <= value <= LARGEST else 0


def _integer(told: dict[str, Any], name: str) -> int:
    value = told.get(name)
    if type(value) is not int:
        raise TraceError(f"not a number: {name} {str(value)[:40]!r}")
    return value

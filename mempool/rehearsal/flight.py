"""Replay of a flight recorder on the stand-in: the pool's calls, with the driver's recorded answers.

    $ MEMPOOL_FLIGHT=run.flight python train.py
    $ python -m mempool.rehearsal.flight run.flight

The replay records a second flight, and compares both: result, reserved memory, and offset of each buffer in
the driver's allocations. A difference is a decision of the pool that depends on more than its calls and the
driver's answers.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mempool import _core
from mempool.errors import UsageError
from mempool.rehearsal.standin import LIBRARY
from traces.formats.flight import Flight, read_records, signed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_KINDS = ("plain", "growing", "managed", "pinned")
_MARKS = (_core.Mark.STEP, _core.Mark.BEGIN, _core.Mark.END)
_RECORDING = [event for state, event, _ in _core.RecordingSchedule.transitions() if state == "idle"]
#: Functions of the driver that return addresses to the pool.
_ADDRESSES = ("cuMemAlloc_v2", "cuMemAddressReserve", "cuMemAllocManaged", "cuMemHostAlloc")
#: Calls that are compared.
_COMPARED = ("allocate", "free", "use", "reallocate", "give_back", "request_arena", "arena")
_DEFAULT_STREAMS = 2  #: the largest handle of a default stream
_PATTERN_CALLS = ("pattern", "table", "slot", "table_mark")


def replay(path: Path, *, library: Path = LIBRARY) -> tuple[int, list[str]]:
    """Replay a flight; return the number of compared calls and a line for each of the first differences.

    Raises:
        UsageError: the flight has lost its beginning, has no pool on a GPU, or several, or captured graphs.
        TraceError: the file is no flight.
    """
    flight = read_records(path)
    _check(flight)
    with tempfile.TemporaryDirectory() as folder:
        again = Path(folder, "again.flight")
        _core.begin_flight(str(again), max(1 << 12, 2 * len(flight.records)))
        try:
            _Replay(flight, library).run()
        finally:
            _core.begin_flight("")
        return _compare(list(_placed(flight)), list(_placed(read_records(again))))


def _check(flight: Flight) -> None:
    if flight.lost:
        raise UsageError(f"the flight has lost its first {flight.lost:,} records: a replay needs all")
    if not flight.calls("device_made").any() or flight.calls("pool_made").sum() != 1:
        raise UsageError("a replay is of one pool on a GPU")
    if flight.calls("begin_graph").any():
        raise UsageError("a flight with captured graphs cannot be replayed")


class _Replay:
    """The pool, its clients and the threads of a replay."""

    def __init__(self, flight: Flight, library: Path) -> None:
        self._flight = flight
        self._library = str(library)
        self._driver = ctypes.CDLL(str(library))
        self._numbers = {name: number for number, name in enumerate(flight.names)}
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._clients: dict[int, Any] = {}
        self._addresses: dict[int, int] = {0: 0}  # of live buffers: recorded -> replayed
        self._patterns: defaultdict[int, list[Any]] = defaultdict(
            list
        )  # of each thread: noted, not installed
        self._streams = _Streams(self._make_stream)
        self._device: Any = None
        self._index = 0  # of the device
        self._pool: Any = None

    def run(self) -> None:
        self._answer()
        for record in self._flight.records:
            name = self._flight.names[record["call"]]
            arguments = record["arguments"].tolist()
            thread = int(record["thread"])
            if name in _PATTERN_CALLS:
                self._patterns[thread].append((name, arguments))
            elif (call := self._call(name, arguments, int(record["user"]), thread)) is not None:
                if thread not in self._threads:
                    self._threads[thread] = ThreadPoolExecutor(1)
                answer = self._threads[thread].submit(call).result()
                if name in ("allocate", "reallocate") and record["result"] == 0:
                    self._addresses[arguments[2 if name == "allocate" else 3]] = answer
            elif name == "thread_ends" and thread in self._threads:
                _end(self._threads.pop(thread))
        for executor in self._threads.values():
            executor.shutdown()

    def _answer(self) -> None:
        """Pass the recorded GPU-dependent answers (failures, events, free memory) to the driver."""
        driver = self._driver
        driver.fake_answer.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t]
        records = self._flight.records
        indices = records["arguments"][self._flight.calls("cuDeviceGet"), 1].astype(np.int64).tolist()
        self._index = indices[0] if indices else 0
        driver.fake_reset(1 + max([1, *indices]))
        symbols = [name for name in self._flight.names if name.startswith("cu")]
        for symbol in symbols:
            mine = records[self._flight.calls(symbol)]
            if symbol == "cuMemGetInfo_v2" or mine["result"].any():
                for record in mine:
                    answer = record["arguments"].tolist()
                    driver.fake_answer(symbol.encode(), int(record["result"]), answer[0], answer[1])

    def _call(self, name: str, a: list[int], user: int, thread: int) -> Callable[[], Any] | None:
        """Return the function that repeats a call; None for records other than calls of a pool."""
        client: Any = self._clients.get(user)
        at, stream = self._addresses, self._streams
        calls: dict[str, Callable[[], Any]] = {
            "device_made": lambda: self._make_device(signed(a[0]), a[1], else_plain=bool(a[2])),
            "pool_made": lambda: self._make_pool(a),
            "client_made": lambda: self._clients.update({user: _core.Client(self._pool, f"replay {user}")}),
            "allocate": lambda: client.allocate(a[0], stream[a[1]]),
            "free": lambda: client.free(at.get(a[0], 0), stream[a[1]]),
            "use": lambda: client.use(at.get(a[0], 0), stream[a[1]]),
            "reallocate": lambda: client.reallocate(at.get(a[0], 0), a[1], stream[a[2]])[0],
            "mark": lambda: client.mark(_MARKS[a[0]], detected=bool(a[1])),
            "enter_dynamic": lambda: client.enter_dynamic(),
            "leave_dynamic": lambda: client.leave_dynamic(),
            "next_at": lambda: client.allocate_next_at(a[0]),
            "recording": lambda: client.advance_recording(_RECORDING[a[0]]),
            "tracing": lambda: client.set_tracing(bool(a[0])),
            "install": lambda: client.install(self._pattern(thread), a[0], bool(a[1])),
            "load": lambda: client.load(
                self._pattern(thread) if a[0] else None, self._pattern(thread), unsure=bool(a[1])
            ),
            "drop_patterns": lambda: client.drop_patterns(),
            "device_bound": lambda: (self._device.bind(self._index), client.device_is_bound()),
            "request_arena": lambda: client.request_arena(),
            "arena_allowed": lambda: client.set_arena_allowed(bool(a[0])),
            "give_back": lambda: client.give_back(bool(a[0])),
            "retire_unused": lambda: client.retire_unused_patterns(),
            "return_idle": lambda: self._pool.return_idle(),
            "retained_limit": lambda: self._pool.set_retained_limit(a[0]),
            "max_reserved": lambda: self._pool.set_max_reserved(a[0]),
            "budget": lambda: self._pool.set_budget(a[0]),
        }
        return calls.get(name)

    def _make_device(self, index: int, kind: int, *, else_plain: bool) -> None:
        if self._pool is None:  # later devices only answer queries of streams
            self._device = _core.CudaDevice(
                None if index < 0 else index,
                driver=self._library,
                memory=_KINDS[kind],
                else_plain=else_plain,
            )

    def _make_pool(self, a: list[int]) -> None:
        self._pool = _core.Pool(
            device=self._device, small_bytes=a[0], max_reserved=a[1], share_streams=bool(a[2])
        )

    def _make_stream(self) -> int:
        for name, kinds in (
            ("fake_primary", [ctypes.c_int]),
            ("fake_stream", [ctypes.c_void_p, ctypes.c_int]),
        ):
            getattr(self._driver, name).argtypes = kinds
            getattr(self._driver, name).restype = ctypes.c_void_p
        return int(self._driver.fake_stream(self._driver.fake_primary(self._index), 0))

    def _pattern(self, thread: int) -> Any:
        """Return the first pattern that a thread has noted."""
        notes = self._patterns[thread]
        _, (arena_bytes, unroll, low_water, flags) = notes.pop(0)
        pattern = _core.Pattern(
            cyclic=bool(flags & 1),
            marked=bool(flags & 2),
            unroll=unroll,
            arena_bytes=arena_bytes,
            low_water=low_water,
        )
        while notes and notes[0][0] == "table":
            _, (sequence, stream, phase, _) = notes.pop(0)
            slots: list[list[int]] = []
            marks: list[list[int]] = []
            while notes and notes[0][0] in ("slot", "table_mark"):
                name, arguments = notes.pop(0)
                (slots if name == "slot" else marks).append(arguments)
            sizes, least, offsets = np.array(slots, np.uint64)[:, :3].T.astype(np.int64)
            bounds = {"least": np.ascontiguousarray(least[::unroll])} if least.any() else {}
            pattern.add_table(
                sequence=sequence,
                stream=self._streams[stream],
                sizes=np.ascontiguousarray(sizes[::unroll]),
                offsets=np.ascontiguousarray(offsets.reshape(-1, unroll)),
                phase=phase,
                marks=[mark[0] for mark in marks],
                **bounds,
            )
        return pattern


def _end(executor: ThreadPoolExecutor) -> None:
    """End a thread, and wait for the end of its thread-local objects, which a join does not."""
    task = Path(f"/proc/self/task/{executor.submit(threading.get_native_id).result()}")
    executor.shutdown()
    while task.exists():
        time.sleep(1e-4)


class _Streams(dict[int, int]):
    """Map of recorded streams to replayed streams; default streams keep their numbers."""

    def __init__(self, make: Callable[[], int]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, recorded: int) -> int:
        default = recorded <= _DEFAULT_STREAMS or recorded >> 63
        self[recorded] = signed(recorded) if default else self._make()
        return self[recorded]


def _placed(flight: Flight) -> Iterator[tuple[Any, ...]]:
    """Yield the compared calls, each address as (number of the driver's allocation, offset)."""
    bases: list[tuple[int, int]] = []
    made = 0
    streams = _Streams(itertools.count(_DEFAULT_STREAMS + 1).__next__)

    def place(address: int) -> tuple[int, int]:
        index = bisect.bisect_right(bases, (address, sys.maxsize)) - 1
        return (-1, 0) if index < 0 or address == 0 else (bases[index][1], address - bases[index][0])

    for record in flight.records[flight.calls(*_COMPARED, *(set(_ADDRESSES) & set(flight.names)))]:
        name, (first, second, third, fourth) = flight.names[record["call"]], record["arguments"].tolist()
        if name in _ADDRESSES:
            if record["result"] == 0:
                bases = [entry for entry in bases if entry[0] != first]
                bisect.insort(bases, (first, made))
                made += 1
            continue
        result = (name, int(record["result"]))
        if name == "allocate":
            yield (*result, first, streams[second], place(third), fourth)
        elif name == "free":
            yield (*result, place(first), streams[second], fourth)
        elif name == "reallocate":
            yield (*result, place(first), second, place(fourth))
        elif name == "use":
            yield (*result, place(first), streams[second])
        else:
            yield (*result, first, second)


def _compare(recorded: list[Any], replayed: list[Any], *, most: int = 10) -> tuple[int, list[str]]:
    differences = [
        f"call {number}: recorded {one}, replayed {other}"
        for number, (one, other) in enumerate(zip(recorded, replayed, strict=False), 1)
        if one != other
    ][:most]
    if len(recorded) != len(replayed):
        differences.append(f"recorded {len(recorded):,} calls, replayed {len(replayed):,}")
    return len(recorded), differences


def main() -> None:
    """Replay the flight named on the command line; exit code 1 if it differs."""
    count, differences = replay(Path(sys.argv[1]))
    verdict = "not the same" if differences else "the same"
    sys.stdout.write("\n".join([*differences, f"{count:,} calls, {verdict}", ""]))
    sys.exit(bool(differences))


if __name__ == "__main__":
    main()

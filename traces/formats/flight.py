"""Reader of flight recorders: the newest calls of mempool's pools and of the CUDA driver.

The variable ``MEMPOOL_FLIGHT`` names the file that a process writes.

A file has a header (little-endian: magic, version, process, capacity, total number of records, time, names of
the calls) and a ring of records of 64 bytes. A record whose number does not match its position is incomplete
and omitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.errors import TraceError
from traces.trace import EventType, Trace

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from _typeshed import StrPath
    from numpy.typing import NDArray

    from traces.formats.text_files import Head

MAGIC = b"mpflight"
_HEADER_BYTES, _NAMES_AT, _NAME_BYTES = 16384, 256, 40
_HEADER = np.dtype(
    [("magic", "S8"), ("version", "<u4"), ("pid", "<u4")]
    + [(name, "<u8") for name in ("capacity", "next", "epoch_ns", "began_ns", "names")]
)
RECORD = np.dtype(
    [
        ("number", "<u8"),
        ("end_ns", "<u8"),
        ("arguments", "<u8", 4),
        ("ns", "<u4"),
        ("result", "<i4"),
        ("thread", "<u4"),
        ("call", "<u2"),
        ("user", "<u2"),
    ]
)
#: Results of the driver that are answers, not failures: success and "not ready".
_ANSWERS = (0, 600)


@dataclass(frozen=True)
class Flight:
    """The records of a file, oldest first.

    Attributes:
        records: rows of `RECORD`.
        names: names of the calls, by number.
        lost: number of overwritten records.
        pid: number of the recorded process.
        epoch_ns: start of the recording in ns since 1970.
        began_ns: start of the recording on the clock of the records, in ns.
    """

    records: NDArray[Any]
    names: tuple[str, ...]
    lost: int
    pid: int
    epoch_ns: int
    began_ns: int

    def calls(self, *names: str) -> NDArray[np.bool_]:
        """Return the mask of the records of these calls, bool[n]."""
        mask: NDArray[np.bool_] = np.isin(self.records["call"], [self.names.index(name) for name in names])
        return mask

    @property
    def failures(self) -> NDArray[Any]:
        """Records of failed calls: errors of the driver, and requests that the pool could not serve."""
        result = self.records["result"]
        return self.records[~np.isin(result, _ANSWERS) & ~self.calls("free", "use")]


def is_flight(head: Head) -> bool:
    """Return true for the first bytes of a flight recorder's file."""
    return head.content.startswith(MAGIC)


def read_records(path: StrPath) -> Flight:
    """Read the records of a file, which may still be written to.

    Raises:
        TraceError: a file of another version, or cut off.
        OSError: the file cannot be read.
    """
    data = Path(path).read_bytes()
    if len(data) < _HEADER_BYTES or not data.startswith(MAGIC):
        raise TraceError("no file of a flight recorder", file=path)
    header = np.frombuffer(data, _HEADER, 1)[0]
    if header["version"] != 1 or len(data) < _HEADER_BYTES + int(header["capacity"]) * RECORD.itemsize:
        raise TraceError("a flight recorder's file of another version, or cut off", file=path)
    ring = np.frombuffer(data, RECORD, int(header["capacity"]), _HEADER_BYTES)
    count = int(header["next"])
    numbers = np.arange(max(0, count - len(ring)), count, dtype=np.uint64)
    records = ring[(numbers % np.uint64(len(ring))).astype(np.int64)]
    names = [data[at : at + _NAME_BYTES] for at in range(_NAMES_AT, _HEADER_BYTES, _NAME_BYTES)]
    return Flight(
        records[records["number"] == numbers + np.uint64(1)],
        tuple(name.rstrip(b"\0").decode("ascii", "replace") for name in names[: int(header["names"])]),
        max(0, count - len(ring)),
        *(int(header[name]) for name in ("pid", "epoch_ns", "began_ns")),
    )


def read_flight(
    path: StrPath,
    *,
    skipped: Counter[str] | None = None,  # noqa: ARG001 - every reader takes both
    progress: Callable[[int, int], object] | None = None,  # noqa: ARG001
) -> Trace:
    """Read the buffers of all pools as a trace, without frees of buffers older than the first record.

    Raises:
        TraceError, OSError: as `read_records`.
    """
    flight = read_records(path)
    numbers = {name: flight.names.index(name) for name in ("allocate", "free", "reallocate", "mark")}
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    live: dict[int, int] = {}
    allocated = 0
    threads: dict[int, int] = {}
    for record in flight.records[flight.calls(*numbers)]:
        first, second, third, fourth = record["arguments"].tolist()
        call, ok = int(record["call"]), record["result"] == 0
        rest = int(record["end_ns"]), threads.setdefault(int(record["thread"]), len(threads))
        if call == numbers["mark"]:
            if first != 2:  # the end of an iteration is no separate mark
                rows.append((EventType.MARK, -1, 0, 0, -1, *rest))
            continue
        moves = call == numbers["reallocate"]
        frees, stream = (first, third) if moves else (first, second)
        if call != numbers["allocate"] and ok and (buffer := live.pop(frees, None)) is not None:
            rows.append((EventType.FREE, buffer, 0, signed(stream), -1, *rest))
        if call == numbers["free"]:
            continue
        size, address = (second, fourth) if moves else (first, third)
        if ok:
            live[address] = allocated
            rows.append((EventType.ALLOC, allocated, size, signed(stream), signed(address), *rest))
            allocated += 1
        else:
            rows.append((EventType.REFUSED, -1, size, signed(stream), -1, *rest))
    table = np.array(rows, np.int64).reshape(-1, 7)
    names = ("kind", "buffer", "size", "stream", "address", "time_ns", "thread")
    columns: dict[str, Any] = dict(zip(names, table.T, strict=True))
    return Trace.of(**columns, metadata={"framework": "mempool", "flight_lost_records": str(flight.lost)})


def signed(number: int) -> int:
    """Return an argument of a record as a number with a sign."""
    return number - (1 << 64) if number >> 63 else number

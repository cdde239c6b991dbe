"""Reader of logs of RMM's ``logging_resource_adaptor``.

A header ``Thread,Time,Action,Pointer,Size,Stream`` and one line per event; actions are ``allocate``,
``allocate failure``, which is a refused request, and ``free`` (RMM, docs/user_guide/logging.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from traces.columns import LARGEST
from traces.errors import TraceError
from traces.formats.logs import Log, iter_log, read_log, refused_size
from traces.formats.text_files import lines, text_of

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator

    from _typeshed import StrPath

    from traces.formats.text_files import Head
    from traces.trace import Trace

HEADER = ("thread", "time", "action", "pointer", "size", "stream")
#: Address rounding of RMM's resources (rmm/aligned.hpp, CUDA_ALLOCATION_ALIGNMENT).
KNOWN = {"framework": "rmm", "alignment": "256"}
#: Time of day, with a dot or, in earlier releases, a colon before the fraction; or seconds since 1970.
_CLOCK = re.compile(r"(?:(\d{1,2}):(\d{2}):)?(\d{1,12})[.:]?(\d{0,9})", re.ASCII)
#: A line of RMM's own log, ``RMM_DEBUG_LOG_FILE``: thread, time, level (rmm/logger.hpp).
_DEBUG_LINE = re.compile(rb"\[ *\d+\]\[\d\d:\d\d:\d\d:\d+\]\[\w+ *\] ")
_HOUR, _DAY = 3600 * 10**9, 24 * 3600 * 10**9


def read_rmm_log(
    path: StrPath,
    *,
    skipped: Counter[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Trace:
    """Read a log, with addresses, threads and streams.

    Metadata: ``framework``, ``alignment``, ``alive_before`` (buffers allocated before the log) and the keys
    of `traces.completeness`.

    Args:
        path: the log, plain or compressed by gzip.
        skipped: receives the counts of invalid lines, which are left out, by reason; None: the first is an
            error.
        progress: as of `traces.read.read`.

    Raises:
        TraceError: naming the file and, as row, the line: not such a log, a field that is no number,
            memory that is allocated again without a free.
        OSError: the file cannot be read.
    """
    return read_log(path, _fill, KNOWN, skipped, progress)


def iter_rmm_log(path: StrPath, *, skipped: Counter[str] | None = None) -> Iterator[Trace]:
    """Read a log twice, in pieces: `traces.formats.logs.iter_log`."""
    return iter_log(path, _fill, KNOWN, skipped)


def is_log(head: Head) -> bool:
    """Return true for a log of ``logging_resource_adaptor``.

    Raises:
        TraceError: RMM's debug log.
    """
    if _DEBUG_LINE.match(head.line):
        raise TraceError(
            "RMM's debug log, which has no addresses: log allocations by "
            "rmm.enable_logging(log_file_name=...) or rmm::mr::logging_resource_adaptor"
        )
    return _is_header(head.line)


def _is_header(line: bytes) -> bool:
    return tuple(_names(line)) == HEADER


def _names(line: bytes) -> Iterator[str]:
    for name in line.removeprefix(b"\xef\xbb\xbf").decode("latin-1").split(","):
        yield name.strip().lower()


def _fill(path: StrPath, log: Log) -> Iterator[None]:
    clock = _Clock()
    for row, line in lines(path, log.progress):
        if row == 1:
            if not _is_header(line):
                reason = "not a log of RMM: its header is Thread,Time,Action,Pointer,Size,Stream"
                raise TraceError(reason, row=1)
            continue
        try:
            if text := text_of(line):
                _add(log, clock, text.split(","))
        except TraceError as error:
            log.reject(error, row)
        yield


def _add(log: Log, clock: _Clock, fields: list[str]) -> None:
    if len(fields) != len(HEADER):
        raise TraceError(f"not {len(HEADER)} fields: {len(fields)}")
    action = fields[2].strip().lower()
    if action not in ("allocate", "allocate failure", "free"):
        raise TraceError(f"none of RMM's actions: {action[:40]!r}")
    failed = action == "allocate failure"
    address, stream = _number(fields[3], "pointer"), _number(fields[5], "stream")
    size = refused_size(fields[4]) if failed else _number(fields[4], "size")
    if address == size == 0 and not failed:  # RMM's pools return a null pointer for an empty request
        return
    where = (stream, log.thread(_number(fields[0], "thread")), clock.time_ns(fields[1]))
    if failed:
        log.refused(0, size, *where)
    else:
        (log.alloc if action == "allocate" else log.free)(0, address, size, *where)


def _number(text: str, name: str) -> int:
    text = text.strip()
    try:
        value = 0 if text in ("(nil)", "nullptr") else int(text[:40], 16 if text[:2].lower() == "0x" else 10)
    except ValueError:
        value = -1
    if not 0 <= value <= LARGEST or not text.isascii():
        raise TraceError(f"not a number from 0 to 2**62: {name} {text[:40]!r}")
    return value


@dataclass
class _Clock:
    """Clock that converts times of day to ns, and adds a day at each midnight."""

    latest: int = 0
    days: int = 0

    def time_ns(self, text: str) -> int:
        found = _CLOCK.fullmatch(text.strip())
        if found is not None:
            hours, minutes, seconds, fraction = found.groups()
            time = ((int(hours or 0) * 60 + int(minutes or 0)) * 60 + int(seconds)) * 10**9
            time += int(fraction.ljust(9, "0"))
            if hours is not None and time < LARGEST:
                time = self._of_day(time)
            if time < LARGEST:
                return time
        raise TraceError(f"not a clock's time: {text[:40]!r}")

    def _of_day(self, time: int) -> int:
        """Add the previous days to a time of day.

        After midnight, another thread may still log a time from before midnight.
        """
        time += self.days * _DAY
        if time < self.latest - _DAY // 2:
            self.days += 1
            time += _DAY
        elif self.days and time > self.latest + _DAY - _HOUR:
            return time - _DAY
        self.latest = max(self.latest, time)
        return time

"""Logs of RMM's ``logging_resource_adaptor``, as traces.

A header ``Thread,Time,Action,Pointer,Size,Stream`` and a line an event; actions are ``allocate``,
``allocate failure`` and ``free`` (RMM, docs/user_guide/logging.md). What is freed but was never allocated was
there before the log began: it is born at its start. Failures are counted in the metadata, not kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from traces.columns import LARGEST
from traces.errors import TraceError
from traces.living import Living
from traces.trace import Kind, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _typeshed import StrPath

HEADER = ("thread", "time", "action", "pointer", "size", "stream")
#: RMM's resources round addresses to this (rmm/aligned.hpp, CUDA_ALLOCATION_ALIGNMENT).
ALIGNMENT = 256
MAX_LINE_BYTES = 1 << 16
#: Time of day, with a dot or, in earlier releases, a colon before the fraction; or seconds since 1970.
_CLOCK = re.compile(r"(?:(\d{1,2}):(\d{2}):)?(\d{1,12})[.:]?(\d{0,9})", re.ASCII)


def read_rmm_log(path: StrPath) -> Trace:
    """Read a log, with addresses, threads and streams.

    Metadata: ``framework``, ``alignment``, ``alive_before`` (buffers allocated before the log), ``failures``.

    Raises:
        TraceError: naming the file and, as its row, the line: not such a log, a field that is no number,
            memory that is allocated again without a free.
        OSError: the file cannot be read.
    """
    log = _Log()
    row = 0
    try:
        for row, line in _lines(path):
            if row == 1:
                _check_header(line)
            elif line:
                log.add(line.split(","))
        row = 0
        trace = log.trace()
        trace.validate()
    except TraceError as error:
        raise TraceError(error.reason, file=path, row=row or None) from None
    return trace


def _lines(path: StrPath) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1, none longer than `MAX_LINE_BYTES`."""
    with Path(path).open("rb") as file:
        row = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            row += 1
            if len(raw) > MAX_LINE_BYTES:
                raise TraceError(f"line {row} is longer than {MAX_LINE_BYTES} bytes")
            try:
                yield row, raw.decode("utf-8-sig" if row == 1 else "utf-8").strip()
            except UnicodeDecodeError:
                raise TraceError(f"line {row} is not UTF-8 text") from None


def _check_header(line: str) -> None:
    if tuple(name.strip().lower() for name in line.split(",")) != HEADER:
        raise TraceError("not a log of RMM: its header is Thread,Time,Action,Pointer,Size,Stream")


@dataclass
class _Log:
    """Events as rows of (kind, buffer, size, stream, time in ns, thread, address); buffers count from 0."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    before: list[tuple[int, ...]] = field(default_factory=list)
    living: Living = field(default_factory=Living)
    threads: dict[int, int] = field(default_factory=dict)
    failures: int = 0

    def add(self, fields: list[str]) -> None:
        if len(fields) != len(HEADER):
            raise TraceError(f"{len(fields)} fields, not {len(HEADER)}")
        action = fields[2].strip().lower()
        if action == "allocate failure":
            self.failures += 1
            return
        if action not in ("allocate", "free"):
            raise TraceError(f"action {action[:40]!r} is none of RMM's")
        thread = self.threads.setdefault(_number(fields[0], "thread"), len(self.threads))
        address, size, stream = (
            _number(text, name) for text, name in zip(fields[3:], HEADER[3:], strict=True)
        )
        event = (stream, _time_ns(fields[1]), thread)
        if action == "allocate":
            self.rows.append((Kind.ALLOC, self.living.alloc(address), size, *event, address))
            return
        buffer, before = self.living.free(address)
        if before:
            self.before.append((Kind.ALLOC, buffer, size, *event, address))
        self.rows.append((Kind.FREE, buffer, 0, *event, -1))

    def trace(self) -> Trace:
        table = np.array(self.before + self.rows, np.int64).reshape(-1, 7)
        kind, buffer, size, stream, time, thread, address = table.T
        return Trace.of(
            kind,
            buffer,
            size,
            stream=stream,
            time_ns=time,
            thread=thread,
            address=address,
            metadata={
                "framework": "rmm",
                "alignment": str(ALIGNMENT),
                "alive_before": str(len(self.before)),
                "failures": str(self.failures),
            },
        )


def _number(text: str, name: str) -> int:
    text = text.strip()
    try:
        value = 0 if text in ("(nil)", "nullptr") else int(text[:40], 16 if text[:2].lower() == "0x" else 10)
    except ValueError:
        value = -1
    if not 0 <= value <= LARGEST or not text.isascii():
        raise TraceError(f"{name} {text[:40]!r} is not a number from 0 to 2**62")
    return value


def _time_ns(text: str) -> int:
    found = _CLOCK.fullmatch(text.strip())
    if found is not None:
        hours, minutes, seconds, fraction = found.groups()
        whole = (int(hours or 0) * 60 + int(minutes or 0)) * 60 + int(seconds)
        if whole * 10**9 < LARGEST:
            return whole * 10**9 + int(fraction.ljust(9, "0"))
    raise TraceError(f"time {text[:40]!r} is not a clock's")

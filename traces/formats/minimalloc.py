"""Buffers as CSV files in the format of MiniMalloc.

One line per buffer after a header. Columns in any order: ``id`` (or ``buffer``, ``buffer_id``), ``size``,
``lower`` (or ``start``, ``begin``), and ``upper``, exclusive, or ``end``, the last time inclusive. Three
columns are optional: ``alignment``; ``gaps``, as ``LOWER-UPPER`` separated by spaces, inclusive if the column
is ``end``; ``offset``, fixed, -1 or empty if free. A column ``hint`` is ignored. Gaps of a part of the buffer
(``LOWER-UPPER@FROM:TO``) are refused. The format is that of MiniMalloc's
src/converter.cc.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from traces.buffers import Buffers
from traces.columns import LARGEST, column
from traces.errors import TraceError
from traces.files import atomic
from traces.transforms import trace_of_buffers

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Mapping

    from _typeshed import StrPath
    from numpy.typing import ArrayLike

    from traces.formats.text_files import Head
    from traces.trace import Trace

#: Limits of a readable file: bytes of a line, number of lines, number of gaps.
MAX_LINE_BYTES, MAX_BUFFERS = 1 << 20, 1 << 23
_NAMES = {
    **dict.fromkeys(("id", "buffer", "buffer_id"), "id"),
    **dict.fromkeys(("lower", "start", "begin"), "lower"),
    **dict.fromkeys(("upper", "end"), "upper"),
    **{name: name for name in ("size", "alignment", "gaps", "offset", "hint")},
}
_REQUIRED = ("id", "lower", "upper", "size")


@dataclass
class _Rows:
    """The rows read so far; ``inclusive`` is 1 if upper ends are inclusive times, else 0."""

    where: Mapping[str, int]
    inclusive: int
    ids: list[str] = field(default_factory=list)
    numbers: dict[str, array[int]] = field(default_factory=dict)
    gaps: array[int] = field(default_factory=lambda: array("q"))

    def add(self, line: str) -> None:
        fields = line.split(",")
        if len(fields) != len(self.where):
            raise TraceError(f"{len(fields)} fields, the header has {len(self.where)}")
        for name, values in self.numbers.items():
            text = fields[self.where[name]].strip()
            values.append(-1 if name == "offset" and not text else _integer(text, name))
        if "gaps" in self.where:
            for text in fields[self.where["gaps"]].split():
                self.gaps.extend((len(self.ids), *_gap(text, self.inclusive)))
        self.ids.append(fields[self.where["id"]].strip())
        if len(self.ids) > MAX_BUFFERS or len(self.gaps) > 3 * MAX_BUFFERS:
            raise TraceError(f"more than {MAX_BUFFERS} buffers or gaps")

    def buffers(self) -> Buffers:
        table = {name: np.frombuffer(values, np.int64) for name, values in self.numbers.items()}
        return Buffers.of(
            table.pop("lower"),
            table.pop("upper") + self.inclusive,
            table.pop("size"),
            gaps=np.frombuffer(self.gaps, np.int64).reshape(-1, 3),
            ids=self.ids,
            alignment=table.get("alignment", 1),
            offset=table.get("offset", -1),
        )


def read_csv(path: StrPath) -> Buffers:
    """Read buffers on a line from a MiniMalloc CSV; ``offset`` is a fixed offset, as in MiniMalloc.

    Raises:
        TraceError: naming file, line and reason.
        OSError: the file cannot be opened.
    """
    row = 1
    try:
        with Path(path).open("rb") as file:
            lines = _lines(file)
            rows = _header(next(lines, (1, ""))[1])
            for row, text in lines:  # noqa: B007
                rows.add(text)
    except TraceError as error:
        raise TraceError(error.reason, file=path, row=row if error.row is None else error.row) from None
    try:
        return rows.buffers()
    except TraceError as error:
        raise TraceError(error.reason, file=path, row=None if error.row is None else error.row + 2) from None


def is_csv(head: Head) -> bool:
    """Return true for a header with a column ``size``."""
    return not head.compressed and b"size" in (name.strip().lower() for name in head.line.split(b","))


def read_csv_as_trace(
    path: StrPath,
    *,
    skipped: Counter[str] | None = None,  # noqa: ARG001 - a buffer that cannot be is an error
    progress: Callable[[int, int], object] | None = None,  # noqa: ARG001
) -> Trace:
    """Read the buffers of a MiniMalloc CSV as equivalent events (`traces.transforms`).

    Raises:
        TraceError, OSError: as `read_csv`; buffers that events cannot express.
    """
    buffers = read_csv(path)
    try:
        return trace_of_buffers(buffers)
    except TraceError as error:
        raise TraceError(error.reason, file=path) from None


def write_csv(buffers: Buffers, path: StrPath, *, offsets: ArrayLike | None = None) -> None:
    """Write buffers on a line as a MiniMalloc CSV, whole or not at all.

    Args:
        buffers: buffers without a period, without groups and not persistent, since the format cannot express
            these. Streams are omitted. The default id of a buffer is its row.
        path: the file.
        offsets: int64[n], a solution, written to the column ``offset`` in place of fixed offsets.

    Raises:
        TraceError: buffers or ids that the format cannot hold.
        OSError: the file cannot be written.
    """
    grouped = (buffers.group != buffers.group[:1]).any()
    if buffers.period is not None or buffers.persistent.any() or grouped:
        raise TraceError("a CSV holds buffers on a line, without groups or persistent ones")
    table = {
        "id": _ids(buffers),
        "lower": buffers.start.tolist(),
        "upper": buffers.end.tolist(),
        "size": buffers.size.tolist(),
    }
    if (buffers.alignment != 1).any():
        table["alignment"] = buffers.alignment.tolist()
    if len(buffers.gap_buffer):
        table["gaps"] = _gap_texts(buffers)
    if offsets is not None or (buffers.offset >= 0).any():
        chosen = buffers.offset if offsets is None else column(offsets, np.int64, "offsets", len(buffers))
        table["offset"] = chosen.tolist()
    with atomic(path) as beside, beside.open("w", encoding="utf-8", newline="\n") as file:
        file.write(",".join(table) + "\n")
        file.writelines(",".join(map(str, row)) + "\n" for row in zip(*table.values(), strict=True))


def _lines(file: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of text, of bounded length; empty lines are permitted only at the end."""
    row = blank = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        row += 1
        if len(raw) > MAX_LINE_BYTES:
            raise TraceError(f"a line of more than {MAX_LINE_BYTES} bytes", row=row)
        try:
            text = raw.decode().strip("\r\n")
        except UnicodeDecodeError:
            raise TraceError("not UTF-8 text", row=row) from None
        if not text.strip():
            blank = blank or row
        elif blank:
            raise TraceError("an empty line before the end", row=blank)
        else:
            yield row, text


def _header(line: str) -> _Rows:
    given = [name.strip().lower() for name in line.removeprefix("\ufeff").split(",")]
    if given == [""]:
        raise TraceError("the file is empty")
    where: dict[str, int] = {}
    for at, name in enumerate(given):
        if name not in _NAMES:
            raise TraceError(f"unknown column {name[:40]!r}")
        if _NAMES[name] in where:
            raise TraceError(f"a second column for {_NAMES[name]!r}, called {name!r}")
        where[_NAMES[name]] = at
    if missing := [name for name in _REQUIRED if name not in where]:
        raise TraceError(f"no column {' or '.join(repr(n) for n in _NAMES if _NAMES[n] == missing[0])}")
    numbers = {name: array("q") for name in where if name not in ("id", "gaps", "hint")}
    return _Rows(where, int("end" in given), numbers=numbers)


def _integer(text: str, name: str) -> int:
    digits = text[1:] if text[:1] == "-" else text
    if digits.isdigit() and digits.isascii() and len(digits) < 20 and abs(value := int(text)) <= LARGEST:
        return value
    raise TraceError(f"{name} {text[:40]!r} is not a whole number within 2**62")


def _gap(text: str, inclusive: int) -> tuple[int, int]:
    if "@" in text:
        raise TraceError(f"gap {text[:40]!r} with a window that stays in use is not supported")
    middle = text.find("-", 1)  # the first character may be a sign
    if middle < 0:
        raise TraceError(f"gap {text[:40]!r} is not LOWER-UPPER")
    return _integer(text[:middle], "gap"), _integer(text[middle + 1 :], "gap") + inclusive


def _gap_texts(buffers: Buffers) -> list[str]:
    texts: list[list[str]] = [[] for _ in range(len(buffers))]
    columns = (buffers.gap_buffer, buffers.gap_start, buffers.gap_end)
    for owner, start, end in zip(*(values.tolist() for values in columns), strict=True):
        texts[owner].append(f"{start}-{end}")
    return [" ".join(parts) for parts in texts]


def _ids(buffers: Buffers) -> list[str]:
    if buffers.ids is None:
        return [str(row) for row in range(len(buffers))]
    for row, name in enumerate(buffers.ids):
        if name != name.strip() or "," in name or len(name.splitlines()) > 1 or not _encodes(name):
            raise TraceError(f"id {name[:40]!r} cannot be written to a CSV", row=row)
    return list(buffers.ids)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

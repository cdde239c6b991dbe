"""Text files, plain or compressed by gzip (recognised by content), and their lines in bounded memory."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from traces.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _typeshed import StrPath, WriteableBuffer

GZIP = b"\x1f\x8b"
MAX_LINE_BYTES = 1 << 16
#: Most bytes that recognition examines: a program may print as much before the first line of CuPy's hook.
_HEAD_BYTES = 1 << 16
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BUFFER_BYTES = 1 << 18


@dataclass(frozen=True)
class Head:
    """The beginning of a file, from which its format is recognised.

    Attributes:
        path: the file.
        content: the first bytes, decompressed.
        compressed: the file is compressed by gzip.
    """

    path: StrPath
    content: bytes
    compressed: bool

    @property
    def text(self) -> bytes:
        """Return the first bytes without a byte order mark."""
        return self.content.removeprefix(_BYTE_ORDER_MARK)

    @property
    def line(self) -> bytes:
        """Return the first line without a byte order mark."""
        return (self.text.splitlines() or [b""])[0]


def read_head(path: StrPath) -> Head:
    """Read the first bytes of a file.

    Raises:
        TraceError: a damaged gzip file.
        OSError: the file cannot be opened.
    """
    with opened(path) as file:
        return Head(path, file.read(_HEAD_BYTES), isinstance(file, gzip.GzipFile))


class _ReportingFile(io.FileIO):
    """File that reports the number of bytes read so far to a progress function."""

    def __init__(self, path: StrPath, progress: Callable[[int, int], object] | None) -> None:
        super().__init__(path)
        self._progress, self._read, self._size = progress, 0, os.fstat(self.fileno()).st_size

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        count = super().readinto(buffer)
        self._read += count or 0
        if self._progress is not None:
            self._progress(self._read, self._size)
        return count


@contextmanager
def opened(
    path: StrPath, progress: Callable[[int, int], object] | None = None
) -> Iterator[BinaryIO | gzip.GzipFile]:
    """Open a file for reading, decompressed if the first bytes are gzip's.

    Args:
        path: the file.
        progress: called now and then with the bytes read so far, as stored, and the bytes of the file.

    Raises:
        TraceError: inside the block, at the end of a truncated or damaged gzip file.
        OSError: the file cannot be opened.
    """
    with io.BufferedReader(_ReportingFile(path, progress), _BUFFER_BYTES) as file:
        if not file.peek(2).startswith(GZIP):
            yield file
            return
        try:
            with gzip.GzipFile(fileobj=file) as plain:
                yield plain
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            reason = " ".join(str(error).split())
            raise TraceError(f"not a whole gzip file: {reason[:200]}", file=path) from None


def lines(path: StrPath, progress: Callable[[int, int], object] | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield lines with their numbers from 1; longer lines are cut to ``MAX_LINE_BYTES + 1`` bytes."""
    with opened(path, progress) as file:
        row = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            row += 1
            yield row, line
            while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES + 1)


def text_of(line: bytes) -> str:
    """Return a line of `lines` as text.

    Raises:
        TraceError: the line is too long, or not UTF-8.
    """
    if len(line) > MAX_LINE_BYTES:
        raise TraceError(f"a line longer than {MAX_LINE_BYTES} bytes")
    try:
        return line.decode().strip()
    except UnicodeDecodeError:
        raise TraceError("not UTF-8 text") from None

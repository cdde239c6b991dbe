"""Text files as they are or compressed by gzip, told by content, and their lines in bounded memory."""

from __future__ import annotations

import gzip
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from traces.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _typeshed import StrPath

GZIP = b"\x1f\x8b"
MAX_LINE_BYTES = 1 << 16


@contextmanager
def opened(path: StrPath) -> Iterator[BinaryIO | gzip.GzipFile]:
    """A file to read, decompressed where it begins as gzip's do.

    Raises:
        TraceError: inside the block, where reading meets the end of a truncated or damaged gzip file.
        OSError: the file cannot be opened.
    """
    with Path(path).open("rb") as file:
        if not file.peek(2).startswith(GZIP):
            yield file
            return
        try:
            with gzip.GzipFile(fileobj=file) as plain:
                yield plain
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            reason = " ".join(str(error).split())
            raise TraceError(f"not a whole gzip file: {reason[:200]}", file=path) from None


def lines(path: StrPath) -> Iterator[tuple[int, bytes]]:
    """Lines with their numbers from 1; of a longer one the first ``MAX_LINE_BYTES + 1`` bytes."""
    with opened(path) as file:
        row = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            row += 1
            yield row, line
            while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE_BYTES + 1)


def text_of(line: bytes) -> str:
    """A line of `lines` as text.

    Raises:
        TraceError: it is too long, or not UTF-8.
    """
    if len(line) > MAX_LINE_BYTES:
        raise TraceError(f"a line longer than {MAX_LINE_BYTES} bytes")
    try:
        return line.decode().strip()
    except UnicodeDecodeError:
        raise TraceError("not UTF-8 text") from None

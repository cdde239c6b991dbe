"""Streaming reader of the events of a Chrome trace, in bounded memory however large the file is.

The standard library's decoder reads each value; this module parses only the text between values. Streaming
libraries (ijson) buffer a whole value of any length, so an endless text or a million brackets would exhaust
the memory; here, no value may exceed `MAX_VALUE_CHARS`.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any, BinaryIO

from traces.errors import TraceError
from traces.formats.text_files import opened

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator
    from gzip import GzipFile

    from _typeshed import StrPath

MAX_VALUE_CHARS = 1 << 22
_CHUNK_BYTES = 1 << 18
_IN_NUMBERS = "0123456789.eE+-"
_SPACE = re.compile(r"[ \t\r\n]*")
_CUT = "truncated, or not JSON"
_decode = json.JSONDecoder(strict=False).raw_decode  # names of functions may contain control characters


def trace_events(
    path: StrPath,
    skipped: Counter[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Iterator[Any]:
    """Yield the values of the list ``traceEvents``, or of a file that is one list, unchecked.

    Keys before that list are ignored; the text after the list is not read. A file that is one list may lack
    its end (Google, "Trace Event Format", "JSON Array Format").

    Args:
        path: the file.
        skipped: if given, a truncated list yields its complete values, and ``truncated`` is counted here.
        progress: as of `traces.read.read`.

    Raises:
        TraceError: naming the file, and as row the index of the event: not JSON, truncated, a value
            longer than `MAX_VALUE_CHARS`, no such list.
        OSError: the file cannot be read.
    """
    count, in_list = 0, False
    try:
        with opened(path, progress) as file:
            window = _Window(file)
            if in_list := window.at_list():
                while (value := window.element(first=count == 0)) is not _END:
                    yield value
                    count += 1
                return
    except UnicodeDecodeError:
        raise TraceError("not UTF-8 text", file=path, row=count) from None
    except TraceError as error:
        if skipped is not None and in_list and isinstance(error, _TruncatedError):
            skipped["truncated"] += 1
            return
        raise TraceError(error.reason, file=path, row=count if error.row is None else error.row) from None
    raise TraceError("JSON, but not a Chrome trace: it has no list 'traceEvents'", file=path)


_END = object()
_CLOSING = re.compile(r"[]}]")


class _TruncatedError(TraceError):
    """Error for a file that ends within a value, or before an expected value."""

    def __init__(self) -> None:
        super().__init__(_CUT)


def _cut(text: str, error: ValueError) -> bool:
    """Return true if the text may be a truncated value: an open string, or a missing closing bracket."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or not _CLOSING.search(text, error.pos)


class _Window:
    """A section of the text of a file; ``_at`` is the start of the next token or value."""

    def __init__(self, file: BinaryIO | GzipFile) -> None:
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._text, self._at, self._ended = "", 0, False
        self._may_end = False  # at the place of the next element

    def at_list(self) -> bool:
        """Go to the first element of the list of events; False if the file has none."""
        opening = self._next()
        if opening == "[":
            self._may_end = True
            return True
        if opening != "{":
            raise TraceError("not JSON: neither an object nor a list")
        while (mark := self._peek()) != "}":
            if mark == ",":
                self._at += 1
            key = self._value()
            if self._next() != ":":
                raise TraceError("not JSON: a key without a value")
            if key == "traceEvents":
                if self._next() != "[":
                    raise TraceError("not a Chrome trace: 'traceEvents' is no list")
                return True
            self._value()
        return False

    def element(self, *, first: bool) -> Any:
        """Return the next element of the list, or `_END`."""
        mark = self._peek()
        if mark == "," and not first:
            self._at += 1
            if self._peek() or not self._may_end:
                return self._value()
            return _END
        if mark == "]" or (not mark and self._may_end):
            return _END
        if mark and not first:
            raise TraceError("not JSON: no comma between events")
        return self._value()

    def _value(self) -> Any:
        self._peek()
        while True:
            try:
                value, end = _decode(self._text, self._at)
                if self._ended or self._text[end : end + 1] not in _IN_NUMBERS:  # "" too is in _IN_NUMBERS
                    self._at = end
                    return value
            except RecursionError:
                raise TraceError("not a Chrome trace: its values are nested too deep") from None
            except ValueError as error:  # the text may hold only the beginning of a value
                if self._ended:
                    raise (_TruncatedError() if _cut(self._text, error) else TraceError(_CUT)) from None
            if len(self._text) - self._at > MAX_VALUE_CHARS:
                raise TraceError(f"not JSON, or a value longer than {MAX_VALUE_CHARS} characters")
            self._fill()

    def _next(self) -> str:
        """Return and consume the next character that is no space; empty at the end of the file."""
        mark = self._peek()
        self._at += 1
        return mark

    def _peek(self) -> str:
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._fill()

    def _fill(self) -> None:
        """Read at least as much text as is pending, so that the window doubles for a long value."""
        rest = self._text[self._at :]
        raw = self._file.read(max(_CHUNK_BYTES, len(rest)))
        self._ended = not raw
        self._text, self._at = rest + self._decode(raw), 0  # an incomplete character at the end is dropped

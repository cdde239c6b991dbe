"""Pickles of plain data, read into Python's objects by the few opcodes that they need: a simple model."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traces.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import StrPath

_MARK = object()


def read_plain(path: StrPath) -> Any:
    """What a pickle of dicts, lists, tuples, texts, bytes, numbers, booleans and None holds.

    Protocols 2 to 5; the opcodes are those of CPython's Lib/pickletools.py.

    Raises:
        TraceError: naming the file and the byte: truncated, contradictory, or an opcode for anything else,
            such as a class or a call.
        OSError: the file cannot be read.
    """
    data = Path(path).read_bytes()
    reader = _Reader(data)
    try:
        return reader.value()
    except TraceError as error:
        raise error.within(path) from None
    except (IndexError, KeyError, TypeError, AttributeError, ValueError, struct.error):
        reason = "truncated" if reader.at >= len(data) else "damaged"
        raise TraceError(f"byte {reader.begin}: the pickle is {reason}", file=path) from None


class _Reader:
    """A stack machine over bytes; ``begin`` is where the current opcode stands, ``at`` the next byte."""

    def __init__(self, data: bytes) -> None:
        self.data, self.begin, self.at = data, 0, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def value(self) -> Any:
        data, steps = self.data, _STEPS
        while True:
            self.begin = self.at
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                return self.stack.pop()
            step = steps.get(code)
            if step is None:
                raise TraceError(f"byte {self.begin}: opcode {code:#04x} is not one of plain data")
            step(self)

    def take(self, count: int) -> bytes:
        piece = self.data[self.at : self.at + count]
        self.at += count  # where that is beyond the end, there is no next opcode either
        return piece

    def number(self, form: struct.Struct) -> Any:
        return form.unpack(self.take(form.size))[0]

    def items(self) -> list[Any]:
        """What lies above the last mark, which goes with it."""
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not _MARK:  # IndexError below the first: no mark
            at -= 1
            if at < 0:
                raise IndexError
        found = stack[at + 1 :]
        del stack[at:]
        return found

    def build(self, count: int) -> None:
        """A tuple of the last ``count``."""
        if len(self.stack) < count:
            raise IndexError
        self.stack[-count:] = [tuple(self.stack[-count:])]

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def set_items(self, found: list[Any]) -> None:
        self.stack[-1].update(zip(found[::2], found[1::2], strict=True))  # only a dict has it

    def add_items(self, found: list[Any]) -> None:
        self.stack[-1].update(found)  # of a set; of a dict it fails, but for pairs

    def extend(self, found: list[Any]) -> None:
        self.stack[-1].extend(found)  # only a list has it


_U1, _U2, _U4, _U8 = (struct.Struct(form) for form in ("<B", "<H", "<I", "<Q"))
_I4, _DOUBLE = struct.Struct("<i"), struct.Struct(">d")
_STOP = ord(".")


def _sized(form: struct.Struct, make: Callable[[bytes], Any]) -> Callable[[_Reader], None]:
    return lambda r: r.stack.append(make(r.take(r.number(form))))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _long(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def _number(form: struct.Struct) -> Callable[[_Reader], None]:
    return lambda r: r.stack.append(r.number(form))


def _fresh(make: Callable[[], Any]) -> Callable[[_Reader], None]:
    return lambda r: r.stack.append(make())


def _pair(r: _Reader) -> None:
    value, key = r.stack.pop(), r.stack.pop()
    r.set_items([key, value])


_STEPS: dict[int, Callable[[_Reader], None]] = {
    0x80: lambda r: _ignore(r.take(1)),  # PROTO
    0x95: lambda r: _ignore(r.take(8)),  # FRAME
    ord("("): _fresh(lambda: _MARK),
    ord("}"): _fresh(dict),
    ord("]"): _fresh(list),
    ord(")"): _fresh(tuple),
    ord("N"): _fresh(lambda: None),
    0x88: _fresh(lambda: True),
    0x89: _fresh(lambda: False),
    ord("K"): _number(_U1),
    ord("M"): _number(_U2),
    ord("J"): _number(_I4),
    ord("G"): _number(_DOUBLE),
    0x8A: _sized(_U1, _long),
    0x8B: _sized(_U4, _long),
    0x8C: _sized(_U1, _text),
    ord("X"): _sized(_U4, _text),
    0x8D: _sized(_U8, _text),
    ord("C"): _sized(_U1, bytes),
    ord("B"): _sized(_U4, bytes),
    0x8E: _sized(_U8, bytes),
    0x96: _sized(_U8, bytearray),
    0x8F: _fresh(set),
    0x90: lambda r: r.add_items(r.items()),
    0x91: lambda r: r.stack.append(frozenset(r.items())),
    0x85: lambda r: r.build(1),
    0x86: lambda r: r.build(2),
    0x87: lambda r: r.build(3),
    ord("t"): lambda r: r.stack.append(tuple(r.items())),
    ord("u"): lambda r: r.set_items(r.items()),
    ord("s"): _pair,
    ord("e"): lambda r: r.extend(r.items()),
    ord("a"): lambda r: r.extend([r.stack.pop()]),
    0x94: lambda r: r.put(len(r.memo)),
    ord("q"): lambda r: r.put(r.number(_U1)),
    ord("r"): lambda r: r.put(r.number(_U4)),
    ord("h"): lambda r: r.stack.append(r.memo[r.number(_U1)]),
    ord("j"): lambda r: r.stack.append(r.memo[r.number(_U4)]),
}


def _ignore(_: bytes) -> None:
    """A header that says nothing of the value."""

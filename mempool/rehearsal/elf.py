"""Shared libraries as ELF files: read imported functions, write libraries of functions that do nothing.

Layouts follow the System V ABI (chapters "Object Files" and "Dynamic Linking") and its supplements for x86-64
and AArch64.
"""

from __future__ import annotations

import mmap
import platform
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mempool.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_PAGE = 1 << 16  #: the largest page of the supported machines, in bytes
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ = 1, 4, 5, 6, 7, 8
_DT_RELAENT, _DT_STRSZ, _DT_SYMENT, _DT_SONAME = 9, 10, 11, 14
_DT_GNU_HASH, _DT_VERSYM = 0x6FFFFEF5, 0x6FFFFFF0
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)


def read_imports(path: Path) -> tuple[list[str], set[str]]:
    """Return the libraries that a shared library is linked with, and the symbols that it takes from others.

    Raises:
        UsageError: the file is no shared library for 64-bit little-endian machines.
        OSError: the file cannot be read.
    """
    with _reading(path) as reader:
        return reader.needed(), reader.names(defined=False)


def read_needed(path: Path) -> list[str]:
    """Return the libraries that a shared library is linked with.

    Raises:
        UsageError: the file is no shared library for 64-bit little-endian machines.
        OSError: the file cannot be read.
    """
    with _reading(path) as reader:
        return reader.needed()


def read_exports(path: Path) -> set[str]:
    """Return the symbols that a shared library offers to others.

    Raises:
        UsageError: the file is no shared library for 64-bit little-endian machines.
        OSError: the file cannot be read.
    """
    with _reading(path) as reader:
        return reader.names(defined=True)


@contextmanager
def _reading(path: Path) -> Iterator[_Reader]:
    """Yield the reader of a file; refuse a file that is empty, of another kind, or cut off."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield _Reader(data)
    except (ValueError, StopIteration, struct.error) as error:
        raise UsageError(f"{path} is no 64-bit shared library") from error


class _Reader:
    """The dynamic section of one shared library."""

    def __init__(self, data: mmap.mmap) -> None:
        """Raise ValueError, StopIteration or struct.error for data of another kind."""
        self._data = data
        header = self._data[:64]
        if header[:6] != b"\x7fELF\x02\x01":
            raise ValueError("no 64-bit little-endian ELF file")
        (table,), (size, count) = struct.unpack_from("<Q", header, 32), struct.unpack_from("<HH", header, 54)
        segments = [struct.unpack_from("<IIQQQQQQ", self._data, table + i * size) for i in range(count)]
        self._loads = [segment for segment in segments if segment[0] == _PT_LOAD]
        dynamic = next(segment for segment in segments if segment[0] == _PT_DYNAMIC)
        pairs = np.frombuffer(self._data[dynamic[2] : dynamic[2] + dynamic[5]], "<u8").reshape(-1, 2).tolist()
        self._entries: list[tuple[int, int]] = [(tag, value) for tag, value in pairs]
        self._strings = self._offset(_DT_STRTAB)

    def _offset(self, entry: int) -> int:
        """Return the place in the file that an entry of the dynamic section points at."""
        address = next(value for tag, value in self._entries if tag == entry)
        load = next(load for load in self._loads if load[3] <= address < load[3] + load[5])
        return int(address - load[3] + load[2])

    def _text(self, position: int) -> str:
        begin = self._strings + position
        return self._data[begin : self._data.find(b"\0", begin)].decode("ascii", "replace")

    def needed(self) -> list[str]:
        return [self._text(value) for tag, value in self._entries if tag == _DT_NEEDED]

    def names(self, *, defined: bool) -> set[str]:
        begin = self._offset(_DT_SYMTAB)
        # No entry has the number of symbols: they end where the next table begins.
        tables = (_DT_STRTAB, _DT_VERSYM, _DT_HASH, _DT_GNU_HASH)
        ends = [self._offset(tag) for tag, _ in self._entries if tag in tables]
        count = (min(end for end in ends if end > begin) - begin) // _SYMBOL.itemsize
        symbols = np.frombuffer(self._data[begin : begin + count * _SYMBOL.itemsize], _SYMBOL)
        wanted = symbols["name"][((symbols["section"] != 0) == defined) & (symbols["name"] != 0)]
        return set(map(self._text, wanted.tolist()))


def write_library(
    path: Path,
    name: str,
    *,
    silent: Sequence[str],
    missing: Sequence[str],
    needed: Sequence[str],
    handler: str,
) -> None:
    """Write a shared library whose functions return 0 or call a handler with their own name.

    Args:
        path: the file to write.
        name: the library's name for the dynamic linker (its SONAME).
        silent: functions that return 0.
        missing: functions that return ``handler(name)``.
        needed: names of the libraries to load with this one; one of them has the handler.
        handler: name of a function ``int handler(const char* name)``.

    Raises:
        UsageError: the machine is neither x86-64 nor AArch64.
    """
    machine = platform.machine()
    if machine not in _MACHINES:
        raise UsageError(f"rehearsals run on x86-64 and AArch64, not on {machine}")
    path.write_bytes(_Writer(_MACHINES[machine], name, silent, missing, needed, handler).image())


@dataclass(frozen=True)
class _Machine:
    """Code of one architecture.

    Attributes:
        number: number of the architecture in an ELF header.
        relocation: type of a relocation that writes a symbol's address.
        returns_zero: machine code of a function that returns 0.
        size: bytes of a function that calls the handler.
    """

    number: int
    relocation: int
    returns_zero: bytes
    size: int

    def call(self, at: int, text: int, pointer: int) -> bytes:
        """Return a function, to lie at an address, that jumps to ``*pointer`` with ``text`` as argument."""
        if self.number == 62:  # lea text(%rip), %rdi; jmp *pointer(%rip)
            return (
                b"\x48\x8d\x3d"
                + struct.pack("<i", text - at - 7)
                + b"\xff\x25"
                + struct.pack("<i", pointer - at - 13)
            )
        adr = 0x10000000 | ((text - at) & 3) << 29 | (((text - at) >> 2) & 0x7FFFF) << 5
        load = 0x58000010 | (((pointer - at - 4) >> 2) & 0x7FFFF) << 5
        return struct.pack("<III", adr, load, 0xD61F0200)  # adr x0, text; ldr x16, pointer; br x16


_MACHINES = {
    "x86_64": _Machine(62, 6, b"\x31\xc0\xc3", 13),
    "aarch64": _Machine(183, 1025, struct.pack("<II", 0x52800000, 0xD65F03C0), 12),
}


class _Writer:
    """The two segments of one library: tables and code, and the dynamic section with a pointer."""

    def __init__(
        self,
        machine: _Machine,
        name: str,
        silent: Sequence[str],
        missing: Sequence[str],
        needed: Sequence[str],
        handler: str,
    ) -> None:
        self._machine = machine
        self._strings = bytearray(b"\0")
        self._name = self._text(name)
        self._needed = [self._text(library) for library in needed]
        self._names = [handler, *silent, *missing]
        self._handler = self._text(handler)
        self._silent = [self._text(function) for function in silent]
        self._missing = [self._text(function) for function in missing]

    def _text(self, text: str) -> int:
        position = len(self._strings)
        self._strings += text.encode() + b"\0"
        return position

    def image(self) -> bytes:
        count = 1 + len(self._names)  # the first symbol is empty, the second the handler
        places, end = {}, 64 + 56 * 4
        for part, size in {
            "symbols": 24 * count,
            "hash": 4 * (2 + 2 * count - 1),
            "relocations": 24,
            "strings": len(self._strings),
            "code": 16 + 16 * len(self._missing),
        }.items():
            places[part] = (end + 15) // 16 * 16
            end = places[part] + size
        data = (end + _PAGE - 1) // _PAGE * _PAGE
        dynamic = self._dynamic(places)
        pointer = data + len(dynamic)
        image = bytearray(pointer + 8)
        self._put(image, places["symbols"], self._symbols(places["code"]))
        self._put(image, places["hash"], _hash_table(self._names))
        self._put(
            image, places["relocations"], struct.pack("<QQq", pointer, 1 << 32 | self._machine.relocation, 0)
        )
        self._put(image, places["strings"], bytes(self._strings))
        self._put(image, places["code"], self._code(places, pointer))
        self._put(image, data, dynamic)
        self._put(image, 0, self._headers(end, data, len(dynamic)))
        return bytes(image)

    @staticmethod
    def _put(image: bytearray, place: int, part: bytes) -> None:
        image[place : place + len(part)] = part

    def _symbols(self, code: int) -> bytes:
        function, here, elsewhere = 0x12, 1, 0  # a global function
        symbols = bytearray(24) + struct.pack("<IBBHQQ", self._handler, function, 0, elsewhere, 0, 0)
        for position in self._silent:
            symbols += struct.pack(
                "<IBBHQQ", position, function, 0, here, code, len(self._machine.returns_zero)
            )
        for i, position in enumerate(self._missing):
            symbols += struct.pack(
                "<IBBHQQ", position, function, 0, here, code + 16 + 16 * i, self._machine.size
            )
        return bytes(symbols)

    def _code(self, places: dict[str, int], pointer: int) -> bytes:
        code = bytearray(self._machine.returns_zero.ljust(16, b"\0"))
        for i, position in enumerate(self._missing):
            at = places["code"] + 16 + 16 * i
            code += self._machine.call(at, places["strings"] + position, pointer).ljust(16, b"\0")
        return bytes(code)

    def _dynamic(self, places: dict[str, int]) -> bytes:
        entries = [
            *((_DT_NEEDED, library) for library in self._needed),
            (_DT_SONAME, self._name),
            (_DT_HASH, places["hash"]),
            (_DT_STRTAB, places["strings"]),
            (_DT_STRSZ, len(self._strings)),
            (_DT_SYMTAB, places["symbols"]),
            (_DT_SYMENT, 24),
            (_DT_RELA, places["relocations"]),
            (_DT_RELASZ, 24),
            (_DT_RELAENT, 24),
            (0, 0),
        ]
        return b"".join(struct.pack("<QQ", *entry) for entry in entries)

    def _headers(self, code_end: int, data: int, dynamic_size: int) -> bytes:
        shared, version = 3, 1
        identity = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
        header = struct.pack(
            "<HHIQQQIHHHHHH", shared, self._machine.number, version, 0, 64, 0, 0, 64, 56, 4, 0, 0, 0
        )
        readable, writable, executable = 4, 2, 1
        segments = (
            (_PT_LOAD, readable | executable, 0, code_end, _PAGE),
            (_PT_LOAD, readable | writable, data, dynamic_size + 8, _PAGE),
            (_PT_DYNAMIC, readable | writable, data, dynamic_size, 8),
            (_PT_GNU_STACK, readable | writable, 0, 0, 16),
        )
        table = b"".join(
            struct.pack("<IIQQQQQQ", kind, flags, place, place, place, size, size, alignment)
            for kind, flags, place, size, alignment in segments
        )
        return identity + header + table


def _hash_table(names: Sequence[str]) -> bytes:
    """Return a DT_HASH table of symbols, the first of which is the second of the symbol table."""
    buckets, chain = [0] * len(names), [0] * (len(names) + 1)
    for i, name in enumerate(names, 1):
        bucket = _hash(name) % len(buckets)
        chain[i], buckets[bucket] = buckets[bucket], i
    return struct.pack(f"<{2 + len(buckets) + len(chain)}I", len(buckets), len(chain), *buckets, *chain)


def _hash(name: str) -> int:
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ high >> 24) & ~high
    return value & 0xFFFFFFFF

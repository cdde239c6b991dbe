"""Sizes of the arguments of PyTorch's kernels, from the machine code in its libraries.

A fat binary has machine code for several architectures, compressed by Zstandard or LZ4. The code of each is
an ELF file, whose sections ``.nv.info.KERNEL`` list the kernel's arguments (attribute KPARAM_INFO).
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING

import pyarrow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_HEADER, _HEADER_BYTES = 0xBA55ED50, 16
_MACHINE_CODE, _ENTRY_BYTES = 2, 64
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
_SECTION = struct.Struct("<IIQQQQIIQQ")
_WITH_SIZE, _ARGUMENT = 4, 0x17  #: format and number of the attribute of one argument
_INFO = b".nv.info."


def write_table(path: Path, libraries: Path, capability: tuple[int, int]) -> int:
    """Write a line for each kernel: its name, and the bytes of each argument; return the number of lines.

    Args:
        path: the file.
        libraries: folder of PyTorch's libraries.
        capability: capability of the device, which runs the newest code of its major version that it
            supports.
    """
    lines: dict[str, str] = {}
    for library in sorted(libraries.glob("*.so*")):
        for code in _codes(library, 10 * capability[0] + capability[1]):
            for name, sizes in _kernels(code):
                lines[name] = " ".join(map(str, sizes))
    path.write_text("".join(f"{name} {sizes}\n" for name, sizes in lines.items()))
    return len(lines)


def _codes(library: Path, own: int) -> Iterator[bytes]:
    """Yield the machine code of each fat binary that a device runs."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for name, begin, size in _sections(data):
            at = begin
            while name == b".nv_fatbin" and at + _HEADER_BYTES <= begin + size:
                magic, _, header_bytes, total = struct.unpack_from("<IHHQ", data, at)
                if magic != _HEADER:  # padding
                    at += 8
                    continue
                entries = [
                    entry
                    for entry in _entries(data, at + header_bytes, at + header_bytes + total)
                    if entry[0] // 10 == own // 10 and entry[0] <= own
                ]
                if entries:
                    yield _decompressed(data, *max(entries)[1:])
                at += header_bytes + total


def _entries(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield architecture, place, bytes and decompressed bytes, 0 if not compressed, of machine code."""
    while at + _ENTRY_BYTES <= end:
        kind, _, header_bytes, size, compressed = struct.unpack_from("<HHIQI", data, at)
        architecture, whole = struct.unpack_from("<I24xQ", data, at + 28)
        if header_bytes == 0:
            return
        if kind == _MACHINE_CODE:
            yield architecture, at + header_bytes, compressed or size, whole if compressed else 0
        at += header_bytes + size


def _decompressed(data: mmap.mmap, place: int, size: int, whole: int) -> bytes:
    code = data[place : place + size]
    if whole == 0:
        return code
    codec = "zstd" if code.startswith(_ZSTANDARD) else "lz4_raw"
    return bytes(pyarrow.decompress(code, whole, codec=codec, asbytes=True))


def _sections(data: mmap.mmap | bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, place and bytes of the sections of an ELF file."""
    (table,), (size, count, names) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HHH", data, 58)
    sections = [_SECTION.unpack_from(data, table + index * size) for index in range(count)]
    strings = sections[names][4] if sections else 0
    for section in sections:
        begin = strings + section[0]
        yield data[begin : data.find(b"\0", begin)], section[4], section[5]


def _kernels(code: bytes) -> Iterator[tuple[str, list[int]]]:
    """Yield the name of each kernel of an ELF file with the bytes of its arguments."""
    for name, at, size in _sections(code):
        if not name.startswith(_INFO):
            continue
        end, sizes = at + size, dict[int, int]()
        while at + 4 <= end:
            form, attribute, length = struct.unpack_from("<BBH", code, at)
            if form == _WITH_SIZE and attribute == _ARGUMENT:
                number, packed = struct.unpack_from("<4xH2xI", code, at + 4)
                sizes[number] = packed >> 18
            at += 4 + (length if form == _WITH_SIZE else 0)
        yield name.removeprefix(_INFO).decode("ascii", "replace"), [sizes[number] for number in sorted(sizes)]

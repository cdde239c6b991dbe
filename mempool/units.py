"""Conversion between bytes and text with units, and source lines without folders."""

from __future__ import annotations

import math
import re

from mempool.errors import UsageError

#: Largest number of digits of a size; no memory needs more.
MOST_DIGITS = 40
#: Smallest memory size, in bytes, that is plausible without a unit.
MEBIBYTE = 1 << 20
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def sized(size_bytes: int) -> str:
    """Return bytes with binary units: 1536 gives "1,536 B (1.5 KiB)"."""
    return f"{size_bytes:,} B ({binary(size_bytes)})" if size_bytes >= 1024 else f"{size_bytes:,} B"


def source_line(frame: str) -> str:
    """Return file and line without folders, for paths of any operating system."""
    return re.split(r"[/\\]", frame)[-1]


def binary(size_bytes: float) -> str:
    """Return a size in binary units: 1536 gives "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} TiB"


def typed_size(size_bytes: int) -> str:
    """Return a size for a command line, with three digits and rounded up: 5251201 gives "5.01MiB"."""
    power = 1
    while power < 4 and size_bytes >= 1000 << 10 * power:
        power += 1
    size = size_bytes / (1 << 10 * power)
    digits = 10 ** (2 if size < 10 else 1 if size < 100 else 0)
    return f"{math.ceil(size * digits) / digits:g}{' KMGT'[power]}iB"


def is_unit(text: str) -> bool:
    """Return whether a text is a unit of memory, such as GiB or mb."""
    return text != "" and text.lower() in _UNITS


def parse_bytes(text: str | int) -> int:
    """Return the bytes of "8GiB", "500 MB", "1e9" or a number.

    Raises:
        UsageError: the text is no size, too large, or not a whole number of bytes.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"{text!r} is not a size in bytes, such as 8GiB or 500MB")
    number = int(match[1]) if match[1].isdigit() else float(match[1])
    if len(match[1]) > MOST_DIGITS or number > 2**64:
        raise UsageError(f"{text[:MOST_DIGITS]!r} is more than any memory has")
    if _UNITS[match[2]] == 1 and number != int(number):
        raise UsageError(f"{text!r} is not a whole number of bytes")
    return int(number * _UNITS[match[2]])


def parse_memory(text: str, least_bare: int = MEBIBYTE) -> int:
    """Return the bytes of a memory size or a rate, as `parse_bytes`, but require a plausible unit.

    Args:
        text: as typed by a user.
        least_bare: smallest number other than 0 that is plausible without a unit.

    Raises:
        UsageError: the text is no size, or a smaller number without a unit.
    """
    bare = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*", text.lower())
    if bare is not None and 0 < float(bare[1]) < least_bare:
        unit = "GiB" if float(bare[1]) < 1000 else "MiB"
        raise UsageError(f"{bare[1]!r} has no unit: say {bare[1]}{unit}, or {bare[1]}B if bytes are meant")
    return parse_bytes(text)

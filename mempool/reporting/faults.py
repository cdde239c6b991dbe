"""Faults found by `check=True`: writes outside of live buffers, and invalid frees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["past_end", "before_begin", "after_free", "double_free", "inside"]


@dataclass(frozen=True)
class Fault:
    """One wrong write or free.

    Attributes:
        kind: type of the fault.
        address: address of the buffer.
        size_bytes: size of the buffer.
        offset_bytes: offset of the first written byte, or of the freed address, from ``address``.
        allocated_at: file and line of the allocation, or None if no Python code ran.
        freed_at: file and line of the free, or None; always None while the buffer lives.
        noticed_at: file and line where the fault was noticed; a wrong write happened some time earlier.
    """

    kind: Kind
    address: int
    size_bytes: int
    offset_bytes: int
    allocated_at: str | None
    freed_at: str | None
    noticed_at: str | None

    def __str__(self) -> str:
        allocated = f"allocated at {self.allocated_at or 'an unknown place'}"
        buffer = f"{self.size_bytes:,} bytes at {self.address:#x}, {allocated}"
        if self.kind in ("after_free", "double_free"):
            buffer += f", freed at {self.freed_at or 'an unknown place'}"
        noticed = self.noticed_at or "an unknown place"
        if self.kind == "double_free":
            return f"freed again at {noticed}: {buffer}"
        if self.kind == "inside":
            return (
                f"free of an address {self.offset_bytes:+,} bytes from its beginning at {noticed}: {buffer}"
            )
        what = {"past_end": "past the end", "before_begin": "before the beginning"}.get(
            self.kind, "after the free"
        )
        return f"write {what}, at byte {self.offset_bytes:,}, noticed at {noticed}: {buffer}"

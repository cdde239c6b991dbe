"""What `check=True` finds: writes outside of buffers or after their end, frees of what is none to free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["past_end", "before_begin", "after_free", "double_free", "inside"]


@dataclass(frozen=True)
class Fault:
    """One wrong write or free.

    Attributes:
        kind: what was done.
        address: of the buffer.
        size_bytes: of the buffer.
        offset_bytes: from the address: the first byte that was written, or what was freed.
        allocated_at: file and line, or None where no Python code ran.
        freed_at: the same; None too while the buffer lives.
        noticed_at: where it came out. A wrong write happened somewhere before.
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

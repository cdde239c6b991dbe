"""Slow model of the live buffers at each address: each event examines all live buffers."""

from __future__ import annotations

from dataclasses import dataclass, field

from traces.errors import TraceError


@dataclass
class Living:
    """Live buffers: ``at`` maps an address to a buffer and its bytes; ``gone`` are the freed buffers."""

    at: dict[int, tuple[int, int]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)

    def alloc(self, address: int, size: int, buffer: int) -> None:
        if address in self.at:
            raise TraceError(f"address {address:#x} is allocated again without a free")
        self.gone.add(address)
        if self._overlaps(address, size):
            raise TraceError(f"address {address:#x} is allocated over a buffer that is alive")
        self.gone.discard(address)
        self.at[address] = (buffer, size)

    def free(self, address: int, size: int, buffer: int) -> int:
        """Return the freed buffer; ``buffer`` if it is older than the recording."""
        if address in self.gone:
            raise TraceError(f"address {address:#x} is freed again without an alloc")
        self.gone.add(address)
        if address in self.at:
            return self.at.pop(address)[0]
        if self._overlaps(address, size):
            raise TraceError(f"address {address:#x} is freed, but overlaps a buffer that is alive")
        return buffer

    def alive(self, address: int, size: int, buffer: int) -> bool:
        """Add a buffer that is alive at the end; return true if the buffer is older than the recording."""
        if address in self.gone:
            raise TraceError(f"address {address:#x} is freed, and alive at the end")
        if address in self.at:
            return False
        self.gone.add(address)
        if self._overlaps(address, size):
            raise TraceError(f"address {address:#x} is alive at the end, but overlaps another")
        self.gone.discard(address)
        self.at[address] = (buffer, size)
        return True

    def _overlaps(self, address: int, size: int) -> bool:
        return size > 0 and any(
            length and begin < address + size and address < begin + length
            for begin, (_, length) in self.at.items()
        )

"""Which buffer lives at which address, as a simple model: everything that is alive is looked at each time."""

from __future__ import annotations

from dataclasses import dataclass, field

from traces.errors import TraceError


@dataclass
class Living:
    """``at`` maps an address to the buffer that is alive there and its bytes; ``gone`` are others."""

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
        """The buffer that is freed; ``buffer`` if it was there before."""
        if address in self.gone:
            raise TraceError(f"address {address:#x} is freed again without an alloc")
        self.gone.add(address)
        if address in self.at:
            return self.at.pop(address)[0]
        if self._overlaps(address, size):
            raise TraceError(f"address {address:#x} is freed, but overlaps a buffer that is alive")
        return buffer

    def alive(self, address: int, size: int, buffer: int) -> bool:
        """Whether what is alive at the end was there before."""
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

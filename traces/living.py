"""Which buffer lives at which address, while a log of allocations is read."""

from __future__ import annotations

from dataclasses import dataclass, field

from traces.errors import TraceError


@dataclass
class Living:
    """Buffers, numbered from 0 as they appear; ``at`` maps the address of each that is alive to it."""

    at: dict[int, int] = field(default_factory=dict)
    buffers: int = 0

    def alloc(self, address: int) -> int:
        """The new buffer at an address.

        Raises:
            TraceError: another lives there.
        """
        if address in self.at:
            raise TraceError(f"address {address:#x} is allocated again without a free")
        self.at[address] = self.buffers
        self.buffers += 1
        return self.at[address]

    def free(self, address: int) -> tuple[int, bool]:
        """The buffer that is freed, and whether it was never allocated: it was there before the log began."""
        before = address not in self.at
        buffer = self.alloc(address) if before else self.at[address]
        del self.at[address]
        return buffer, before

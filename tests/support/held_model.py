"""Model that infers the memory held at the beginning of a recording from the memory held at its end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from traces.trace import EventType


@dataclass
class Held:
    """Disjoint ranges; ``at`` maps the address of a range to its bytes and stream."""

    at: dict[int, tuple[int, int]] = field(default_factory=dict)

    def before(self, events: Iterable[tuple[int, int, int, int]]) -> Held:
        """Return the memory held before events of (kind, address, bytes, stream), which are in order of time.

        A recording may contradict itself here: what was reserved and is not held at the end is passed over.
        """
        held = Held(dict(self.at))
        for kind, address, size, stream in reversed(list(events)):
            if size == 0:
                continue
            held._cut(address, size)
            if kind == EventType.RELEASE:
                held.at[address] = (size, stream)
        return held

    def _cut(self, address: int, size: int) -> None:
        """Remove a range from all that it overlaps: an expandable segment grows and shrinks at both ends."""
        for begin, (length, stream) in list(self.at.items()):
            end = begin + length
            if begin < address + size and address < end:
                del self.at[begin]
                if begin < address:
                    self.at[begin] = (address - begin, stream)
                if end > address + size:
                    self.at[address + size] = (end - address - size, stream)

"""The binary buddy system."""

from __future__ import annotations

from dataclasses import dataclass

from solvers import _core
from solvers.simulators.native import Native, check_power_of_two


@dataclass(frozen=True)
class Buddy(Native):
    """The textbook's buddies (Knuth, The Art of Computer Programming 1, 2.5, algorithms R and S).

    Blocks are powers of two. A request takes a block of the smallest size that there is, the lowest; larger
    ones are halved down to it. What is freed merges with its other half, and so on. Streams are ignored,
    and nothing is given back. The textbook has one region; here another is taken when none has room.

    Attributes:
        min_block_bytes: a power of two, the smallest block.
        region_bytes: a power of two, of each region; what is larger has a region of its own.
    """

    min_block_bytes: int = 512
    region_bytes: int = 2 << 20

    def __post_init__(self) -> None:
        check_power_of_two(self.min_block_bytes, "min_block_bytes")
        check_power_of_two(self.region_bytes, "region_bytes")

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedBuddy:
        """As of the base."""
        return _core.SimulatedBuddy(device, least=self.min_block_bytes, region=self.region_bytes)

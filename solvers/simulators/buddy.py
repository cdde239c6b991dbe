"""The binary buddy system."""

from __future__ import annotations

from dataclasses import dataclass

from solvers import _core
from solvers.simulators.native import Native, check_power_of_two


@dataclass(frozen=True)
class Buddy(Native):
    """Textbook buddy allocator (Knuth, The Art of Computer Programming 1, 2.5, algorithms R and S).

    Block sizes are powers of two. A request takes the lowest free block of the smallest sufficient size;
    larger blocks are halved down to the requested size. Freed buddies merge, repeatedly. Streams are
    ignored, and no memory returns to the device. The textbook has one region; this simulation reserves
    another one if none has room.

    Attributes:
        min_block_bytes: a power of two, the smallest block.
        region_bytes: a power of two, the size of each region; a larger request has a separate region.
    """

    min_block_bytes: int = 512
    region_bytes: int = 2 << 20

    def __post_init__(self) -> None:
        check_power_of_two(self.min_block_bytes, "min_block_bytes")
        check_power_of_two(self.region_bytes, "region_bytes")

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedBuddy:
        """Create the allocator, see `Native.on`."""
        return _core.SimulatedBuddy(device, least=self.min_block_bytes, region=self.region_bytes)

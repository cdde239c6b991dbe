"""TensorFlow's allocator."""

from __future__ import annotations

from dataclasses import dataclass

from solvers import _core
from solvers.simulators.native import Native, check_bytes, check_flag


@dataclass(frozen=True)
class Bfc(Native):
    """TensorFlow's and XLA's "best fit with coalescing" (``xla/tsl/framework/bfc_allocator.cc``).

    Sizes are rounded up to 256 bytes. A request takes the smallest sufficient free block, the lowest of equal
    ones. The remainder is split off if the block has twice the size, or is larger by at least
    ``max_slack_bytes``; else the remainder belongs to the buffer. A freed block merges with the neighbours in
    the same region. Regions double: each is twice as large as the last, or large enough, or all that the
    device has left. Before a request fails, free regions return to the device.

    Not modelled: streams (the allocator knows one); requests that are tried again for ten seconds;
    timestamped frees; alignments beyond 256; adjacent regions that become one, as with virtual memory;
    shrinking region sizes if the device has less than TensorFlow believes, which never happens in this
    simulation.

    Attributes:
        allow_growth: TensorFlow's option of that name (`set_memory_growth`). False, TensorFlow's default:
            the first request reserves the whole device, which must then have a limit, and the memory held
            says nothing about the program.
        first_region_bytes: size of the first region if regions grow.
        max_slack_bytes: remainders of at least so many bytes are always split off; TensorFlow's option
            ``internal_fragmentation_fraction`` times the limit.
        garbage_collection: release free regions before a request fails; TensorFlow's
            ``TF_ENABLE_GPU_GARBAGE_COLLECTION``.
    """

    allow_growth: bool = True
    first_region_bytes: int = 2 << 20
    max_slack_bytes: int = 128 << 20
    garbage_collection: bool = True

    def __post_init__(self) -> None:
        check_flag(self.allow_growth, "allow_growth")
        check_flag(self.garbage_collection, "garbage_collection")
        check_bytes(self.first_region_bytes, "first_region_bytes", least=1)
        check_bytes(self.max_slack_bytes, "max_slack_bytes", least=1)

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedBfc:
        """Create the allocator, see `Native.on`.

        Raises:
            ValueError: ``allow_growth`` is False and the device has no limit.
        """
        if not self.allow_growth and device.limit >= _core.LARGEST_DEVICE:
            raise ValueError("allow_growth=False takes the whole device: give it a limit")
        return _core.SimulatedBfc(
            device,
            region=self.first_region_bytes if self.allow_growth else max(device.limit, 1),
            slack=self.max_slack_bytes,
            collects=self.garbage_collection,
        )

"""Plain first fit and best fit as baselines: the effect of the fit rule alone, in one region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from solvers import _core
from solvers.simulators.native import Native, check_power_of_two


@dataclass(frozen=True)
class FirstFit(Native):
    """Lowest sufficient free range, in one region that grows at the end (Knuth, TAOCP 1, 2.5).

    Streams are ignored; a freed range merges with free neighbours at once, and no memory returns to the
    device.

    Attributes:
        alignment_bytes: sizes, and therefore addresses, are multiples of this power of two.
        growth_bytes: the region grows by multiples of this power of two, one driver call each time.
    """

    alignment_bytes: int = 512
    growth_bytes: int = 2 << 20
    _best: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_power_of_two(self.alignment_bytes, "alignment_bytes")
        check_power_of_two(self.growth_bytes, "growth_bytes")

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedFit:
        """Create the allocator, see `Native.on`."""
        return _core.SimulatedFit(
            device, best=self._best, alignment=self.alignment_bytes, growth=self.growth_bytes
        )


@dataclass(frozen=True)
class BestFit(FirstFit):
    """Variant of `FirstFit` that takes the smallest sufficient free range, the lowest of equal ones."""

    _best: ClassVar[bool] = True

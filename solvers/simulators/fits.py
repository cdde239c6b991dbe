"""Plain first fit and best fit, to compare with: what search alone makes of one region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from solvers import _core
from solvers.simulators.native import Native, check_power_of_two


@dataclass(frozen=True)
class FirstFit(Native):
    """The lowest free range that is large enough, in one region that grows at its end (Knuth, TAOCP 1, 2.5).

    Streams are ignored; what is freed merges with its neighbours at once, and nothing is given back.

    Attributes:
        alignment_bytes: sizes, and with them addresses, are multiples of this power of two.
        growth_bytes: the region grows by multiples of this power of two, one call to the driver each time.
    """

    alignment_bytes: int = 512
    growth_bytes: int = 2 << 20
    _best: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_power_of_two(self.alignment_bytes, "alignment_bytes")
        check_power_of_two(self.growth_bytes, "growth_bytes")

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedFit:
        """As of the base."""
        return _core.SimulatedFit(
            device, best=self._best, alignment=self.alignment_bytes, growth=self.growth_bytes
        )


@dataclass(frozen=True)
class BestFit(FirstFit):
    """As `FirstFit`, but the smallest free range that is large enough; of several the lowest."""

    _best: ClassVar[bool] = True

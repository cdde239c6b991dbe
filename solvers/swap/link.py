"""Model of the link between device and host: the duration of copies."""

from __future__ import annotations

import re
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


@dataclass(frozen=True)
class Link:
    """Link with sequential copies in each direction; a copy of ``s`` bytes takes ``a + b * s`` seconds.

    Attributes:
        out_fixed: a of copies to the host, seconds.
        out_per_byte: b of copies to the host, seconds per byte.
        in_fixed: a of copies to the device, seconds.
        in_per_byte: b of copies to the device, seconds per byte.
        duplex: true if copies of the two directions run concurrently; false if one engine makes all copies in
            the order of their requests.

    Raises:
        ValueError: a number that is negative or not finite.
    """

    out_fixed: float
    out_per_byte: float
    in_fixed: float
    in_per_byte: float
    duplex: bool = True

    def __post_init__(self) -> None:
        numbers = (self.out_fixed, self.out_per_byte, self.in_fixed, self.in_per_byte)
        if not all(np.isfinite(number) and number >= 0 for number in numbers):
            raise ValueError("a link has times of 0 or more seconds")

    def out(self, size: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of copies of ``size`` bytes to the host."""
        result: NDArray[np.float64] = self.out_fixed + self.out_per_byte * size.astype(np.float64)
        return result

    def back(self, size: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of copies of ``size`` bytes to the device."""
        result: NDArray[np.float64] = self.in_fixed + self.in_per_byte * size.astype(np.float64)
        return result

    @classmethod
    def of_rate(cls, bytes_per_second: float, fixed: float = 10e-6, *, duplex: bool = True) -> Link:
        """Return a link of the same rate in both directions."""
        if not bytes_per_second > 0:
            raise ValueError("a link's rate is more than 0 bytes a second")
        return cls(fixed, 1 / bytes_per_second, fixed, 1 / bytes_per_second, duplex)


#: Links by name. The rates are those of copies of page-locked memory, about four fifths of the nominal rate:
#: 16, 32 and 64 GB/s of PCI Express x16, and 450 GB/s each way of NVLink-C2C. ``singa`` is the link that
#: AutoSwap's authors measured and published in SINGA's SwapGPU.
PRESETS: Mapping[str, Link] = types.MappingProxyType(
    {
        "pcie3": Link.of_rate(12.5e9),
        "pcie4": Link.of_rate(25e9),
        "pcie5": Link.of_rate(50e9),
        "nvlink-c2c": Link.of_rate(375e9),
        "singa": Link(47.2e-6, 0.0756e-9, 9.7e-6, 0.0823e-9),
    }
)
#: Largest seconds, and seconds per byte, of a link; with larger values, sums would lose the operations'
#: times.
_LATEST, _SLOWEST = 1000.0, 1e-3
_NUMBER = r"\d{1,20}(?:\.\d{0,20})?(?:[eE][+-]?\d{1,3})?"


def parse_link(text: str) -> Link:
    """Parse a link: a name, or "a,b" in seconds and seconds a byte, or "a,b,a,b" for out and in.

    A final ",half" means one engine for both directions.

    Raises:
        ValueError: the text is none of these.
    """
    parts = [part.strip() for part in text.lower().split(",")]
    duplex = parts[-1] != "half"
    parts = parts if duplex else parts[:-1]
    if len(parts) == 1 and parts[0] in PRESETS:
        found = PRESETS[parts[0]]
        return Link(found.out_fixed, found.out_per_byte, found.in_fixed, found.in_per_byte, duplex)
    if len(parts) in (2, 4) and all(re.fullmatch(_NUMBER, part) for part in parts):
        numbers = [float(part) for part in parts]
        if max(numbers[::2]) > _LATEST or max(numbers[1::2]) > _SLOWEST:
            most = f"begins within {_LATEST:g} seconds and takes at most {_SLOWEST:g} for a byte"
            raise ValueError(f"{text!r}: a link {most}")
        out, back = numbers[:2], numbers[-2:]
        return Link(out[0], out[1], back[0], back[1], duplex)
    raise ValueError(f"{text!r} is no link: {', '.join(PRESETS)}, or a,b in seconds and seconds a byte")

"""Base classes and shared functions of the simulators in native code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from solvers import _core
from solvers.simulators.simulation import Course, Segments

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces.trace import Trace


class Allocator(ABC):
    """Base class of the allocators; a subclass is a frozen dataclass whose fields are the settings."""

    @abstractmethod
    def run(self, trace: Trace, limit_bytes: int) -> Course:
        """Simulate a trace of one device on a device of ``limit_bytes`` bytes."""


class Native(Allocator):
    """Base of the allocators that are implemented in native code."""

    @abstractmethod
    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedAllocator:
        """Create the allocator on a device, in its initial state."""

    def run(self, trace: Trace, limit_bytes: int) -> Course:
        """Simulate all events of a trace, see `Allocator.run`."""
        device = _core.SimulatedDevice(limit_bytes)
        return course_of(trace, device, self.on(device), np.empty(0, np.int64))


def course_of(
    trace: Trace,
    device: _core.SimulatedDevice,
    allocator: _core.SimulatedAllocator,
    adopted: NDArray[np.int64],
    *,
    give_back: bool = False,
) -> Course:
    """Return the course of a trace after the first ``len(adopted)`` events.

    ``adopted`` has the allocator's handles of these events' buffers, -1 for none. ``give_back``: the
    allocator repeats the recorded releases of memory.
    """
    columns = trace.kind, trace.births, trace.size, trace.stream
    address, live, reserved, failed_at = allocator.run(
        *columns, adopted, trace.address if give_back else None
    )
    segments = Segments(*device.segments)
    segments.end[segments.end < 0] = len(trace)
    return Course(address, live, reserved, segments, device.calls, None if failed_at < 0 else failed_at)


def check_bytes(value: int, name: str, *, least: int = 0, most: int = 1 << 56) -> None:
    """Raise ValueError unless the value is a whole number in these bounds."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise ValueError(f"{name}={value!r} is not a whole number from {least} to {most}")


def check_power_of_two(value: int, name: str) -> None:
    """Raise ValueError unless the value is a power of two up to 2**40."""
    most = 1 << 40
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or not 1 <= value <= most or value & (value - 1):
        raise ValueError(f"{name}={value!r} is not a power of two up to {most}")

"""A trace through a simulated allocator."""

from __future__ import annotations

import dataclasses
import types
from typing import TYPE_CHECKING, Any

from solvers import _core
from solvers.simulators.registry import ALLOCATORS
from solvers.simulators.simulation import Course, Simulation

if TYPE_CHECKING:
    from traces.trace import Trace


def simulate(
    trace: Trace, allocator: str, *, limit_bytes: int | None = None, **parameters: Any
) -> Simulation:
    """Put a trace's allocs and frees through a simulated allocator.

    Deterministic. Only the order of the events counts, their times do not.

    Args:
        trace: events of one device.
        allocator: a name of `ALLOCATORS`.
        limit_bytes: what the device has; None for more than any has (`LARGEST_DEVICE`, 64 PiB).
        **parameters: settings of the allocator, the fields of its class in `ALLOCATORS`.

    Raises:
        ValueError: no such allocator or setting, a setting out of range, a trace of several devices.
        TraceError: the trace contradicts itself.
    """
    if allocator not in ALLOCATORS:
        raise ValueError(f"no allocator {allocator!r}; there are {', '.join(ALLOCATORS)}")
    if limit_bytes is not None and limit_bytes < 0:
        raise ValueError(f"limit_bytes={limit_bytes} is negative")
    if len(trace) and (trace.device != trace.device[0]).any():
        raise ValueError("a trace of several devices; simulate each by itself")
    kind = ALLOCATORS[allocator]
    known = [field.name for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    if unknown := sorted(parameters.keys() - set(known)):
        raise ValueError(f"{allocator} has no setting {', '.join(unknown)}; there are {', '.join(known)}")
    made = kind(**parameters)
    most = _core.LARGEST_DEVICE
    course = made.run(trace, most if limit_bytes is None else min(limit_bytes, most))
    columns = {field.name: getattr(course, field.name) for field in dataclasses.fields(Course)}
    settings = {name: getattr(made, name) for name in known}
    return Simulation(
        **columns, allocator=allocator, parameters=types.MappingProxyType(settings), trace=trace
    )

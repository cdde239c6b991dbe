"""Simulation of a trace under one of the allocators.

To add an allocator, write a dataclass of its settings, and add the class to `ALLOCATORS`.
"""

from __future__ import annotations

import dataclasses
import types
from typing import TYPE_CHECKING, Any

from solvers import _core
from solvers.simulators.allocator import check_bytes
from solvers.simulators.planned import Planned
from solvers.simulators.pools import BestFit, Cupy, FirstFit
from solvers.simulators.pytorch import PyTorch, PyTorchExpandable
from solvers.simulators.rmm import RmmPool
from solvers.simulators.simulation import Course, Simulation
from traces.transforms import pools_as_streams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from solvers.simulators.allocator import Allocator
    from traces.trace import Trace

#: Classes of settings by name, in the order of comparison tables.
ALLOCATORS: Mapping[str, type[Allocator]] = types.MappingProxyType(
    {
        "pytorch": PyTorch,
        "pytorch_expandable": PyTorchExpandable,
        "cupy": Cupy,
        "rmm_pool": RmmPool,
        "best_fit": BestFit,
        "first_fit": FirstFit,
        "planned": Planned,
    }
)


def simulate(
    trace: Trace,
    allocator: str,
    *,
    limit_bytes: int | None = None,
    allocators: Mapping[str, type[Allocator]] = ALLOCATORS,
    **parameters: Any,
) -> Simulation:
    """Run a trace's allocs and frees through a simulated allocator.

    The result is deterministic, and depends on the order of the events, not on their times. Refused requests
    are ignored (`traces.transforms.refused_as_buffers` makes buffers of them); private pools count as
    separate streams.

    Args:
        trace: events of one device.
        allocator: a name of ``allocators``.
        limit_bytes: bytes of the device; None for more than any device has (`LARGEST_DEVICE`, 64 PiB).
        allocators: classes of settings by name; a superset of `ALLOCATORS` if callers add their own.
        **parameters: settings of the allocator, the fields of the settings' class.

    Raises:
        ValueError: no such allocator or setting, a setting or limit out of range or of another type, a trace
            of several devices.
        TraceError: the trace contradicts itself.
    """
    if allocator not in allocators:
        raise ValueError(f"no allocator {allocator!r}; there are {', '.join(allocators)}")
    if limit_bytes is not None:
        check_bytes(limit_bytes, "limit_bytes", most=1 << 63)
    if len(trace.devices) > 1:
        raise ValueError("a trace of several devices; simulate each by itself")
    allocator_type = allocators[allocator]
    known = settings_of(allocator_type)
    if unknown := sorted(parameters.keys() - set(known)):
        raise ValueError(f"{allocator} has no setting {', '.join(unknown)}; there are {', '.join(known)}")
    settings = allocator_type(**parameters)
    most = _core.LARGEST_DEVICE
    course = settings.run(pools_as_streams(trace), most if limit_bytes is None else min(limit_bytes, most))
    return simulation_of(trace, allocator, settings, course)


def simulation_of(trace: Trace, name: str, allocator: Allocator, course: Course) -> Simulation:
    """Combine trace, allocator name, settings and course in a `Simulation`."""
    columns = {field.name: getattr(course, field.name) for field in dataclasses.fields(Course)}
    settings = {name: getattr(allocator, name) for name in settings_of(type(allocator))}
    return Simulation(**columns, allocator=name, parameters=types.MappingProxyType(settings), trace=trace)


def settings_of(allocator_type: type[Allocator]) -> list[str]:
    """Return the names of the settings of an allocator's class."""
    return [field.name for field in dataclasses.fields(allocator_type)]  # type: ignore[arg-type]

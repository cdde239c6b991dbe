"""Comparison of allocators on one trace, one row each, and the parser of their names."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mempool.analysis.caveats import place_of
from mempool.errors import UsageError
from mempool.simulate import ALLOCATORS, simulate
from mempool.units import parse_bytes
from solvers.simulators.recorded import recorded
from traces import EventType
from traces.completeness import completeness
from traces.transforms import refused_as_buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from solvers.simulators import Simulation
    from traces import Trace
    from traces.completeness import History


#: Name of the trace's recorded allocator.
RECORDED = "recorded"


@dataclass(frozen=True)
class AllocatorSpec:
    """An allocator, named as in `mempool.simulate.ALLOCATORS` or `RECORDED`, with settings."""

    allocator: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """The first request that did not fit.

    Attributes:
        event: row of the request.
        size_bytes: requested bytes.
        operation: operation of the request, None where unknown.
        frame: source line of the request without folders, None where unknown.
        recorded: true if the request failed during the recording, independent of the limit.
        before: true if more than the limit was reserved before the first recorded event, for an unknown
            request; ``event`` and ``size_bytes`` are those of the first alloc.
    """

    event: int
    size_bytes: int
    operation: str | None
    frame: str | None
    recorded: bool
    before: bool


@dataclass(frozen=True)
class Row:
    """The result of one allocator on one device's events.

    If the allocator runs out of memory, ``failed_at`` is the request, and the figures are without a limit. If
    the allocator's own settings limit the memory, the figures cover only the served requests.

    Attributes:
        allocator: name of the allocator.
        device: the device of the events.
        settings: the given settings.
        peak_load_bytes: peak load, including requests that were refused during the recording, except for the
            recorded allocator.
        refused: number of included requests that were refused during the recording.
        peak_live_bytes: peak load with the allocator's rounding.
        peak_reserved_bytes: most bytes held from the device.
        fragmentation: 1 - peak of the served requested bytes / peak reserved; the sum of the next two fields.
        internal_fragmentation: fraction of the peak reserved bytes lost to rounding; None for the recorded
            allocator, whose trace has only requested bytes.
        external_fragmentation: fraction of the peak reserved bytes that no buffer uses; None for the recorded
            allocator.
        driver_calls: calls to the device to take or give back memory.
        largest_free_bytes: the largest free block at the peak of reserved bytes (at several such moments,
            that with the most bytes in use); None where unknown.
        fits: true if all requests, including refused ones, fit in the limit or in the limit of the
            allocator's settings. None without any limit, or if all recorded requests fit but a part of the
            history is missing.
        history: the recorded part of the device's history, a `traces.completeness.History`.
        failed_at: the first request that does not fit, with a row of the whole trace. For the recorded
            allocator, the first refused request.
        seconds: CPU seconds of the simulation.
    """

    allocator: str
    device: int
    settings: dict[str, Any]
    peak_load_bytes: int
    refused: int
    peak_live_bytes: int
    peak_reserved_bytes: int
    fragmentation: float
    internal_fragmentation: float | None
    external_fragmentation: float | None
    driver_calls: int
    largest_free_bytes: int | None
    fits: bool | None
    history: History
    failed_at: Failure | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the columns by name, ready for JSON, with ``error`` None."""
        return {**asdict(self), "error": None}


@dataclass(frozen=True)
class FailedComparison:
    """An allocator that cannot be compared on these events, with a line about the reason in ``error``."""

    allocator: str
    device: int
    settings: dict[str, Any]
    error: str

    def to_dict(self) -> dict[str, Any]:
        """Return the columns of a `Row`, with None for unknown values."""
        return dict.fromkeys(column.name for column in fields(Row)) | asdict(self)


def compare(
    trace: Trace,
    allocators: Sequence[AllocatorSpec] | None = None,
    *,
    limit_bytes: int | None = None,
    on_allocator: Callable[[str], object] = lambda _: None,
) -> Iterator[Row | FailedComparison]:
    """Simulate allocators on a trace; yield a row for each device and allocator.

    Args:
        trace: events; each device is simulated separately.
        allocators: the allocators to compare; None for all, including the recorded allocator if known.
        limit_bytes: memory of each device.
        on_allocator: called with the name of each allocator before the simulation.

    Raises:
        TraceError: the trace contradicts itself.
    """
    trace.validate()
    silent = (
        _without_recorded(trace)
        if allocators is not None and AllocatorSpec(RECORDED) in allocators
        else set()
    )
    for device in trace.devices:
        events = trace if len(trace.devices) == 1 else trace.on_device(device)
        attempts, of_events = refused_as_buffers(events)
        rows = trace.rows_on_device(device)
        for spec in _all(events) if allocators is None else allocators:
            real = spec.allocator == RECORDED
            if real and device in silent:
                continue
            on_allocator(spec.allocator)
            asked, own = (events, rows) if real else (attempts, rows[of_events])
            try:
                row = _row(asked, spec, device, limit_bytes)
                row = replace(row, refused=0 if real else len(attempts) - len(events))
            except ValueError as error:  # unknown settings, or unsuitable for these events
                yield FailedComparison(spec.allocator, device, spec.settings, " ".join(str(error).split()))
                continue
            failed = row.failed_at
            if failed is not None:
                row = replace(row, failed_at=replace(failed, event=int(own[failed.event])))
            yield row


def _without_recorded(trace: Trace) -> set[int]:
    """Return the devices without known figures of `RECORDED`, if other devices have them.

    A profiler's trace has the reserved bytes of GPUs, but not of the host.
    """
    known = {device: recorded(trace.on_device(device)) is not None for device in trace.devices}
    return {device for device, complete in known.items() if not complete} if any(known.values()) else set()


def _all(trace: Trace) -> list[AllocatorSpec]:
    known = [AllocatorSpec(RECORDED)] if recorded(trace) is not None else []
    return known + [AllocatorSpec(name) for name in ALLOCATORS]


def _simulation(trace: Trace, spec: AllocatorSpec, limit_bytes: int | None) -> Simulation:
    if spec.allocator != RECORDED:
        return simulate(trace, spec.allocator, limit_bytes=limit_bytes, **spec.settings)
    found = recorded(trace)
    if found is None:
        raise ValueError(
            "the trace does not tell what its allocator reserved, so nothing is known of `recorded`"
        )
    return found


def _row(trace: Trace, spec: AllocatorSpec, device: int, limit_bytes: int | None) -> Row:
    begin = time.process_time()
    simulation = _simulation(trace, spec, limit_bytes)
    seconds = time.process_time() - begin
    known = completeness(trace, device)
    failure = _failure(
        simulation, limit_bytes, known.reserved_before_bytes if spec.allocator == RECORDED else 0
    )
    if simulation.failed_at is not None and limit_bytes is not None:
        simulation = _simulation(trace, spec, None)
    served = int(simulation.requested.max(initial=0))  # below the load if allocs failed
    live, reserved = simulation.peak_live_bytes, simulation.peak_reserved_bytes
    whole, real = max(reserved, 1), spec.allocator == RECORDED
    return Row(
        allocator=spec.allocator,
        device=device,
        settings=spec.settings,
        peak_load_bytes=int(simulation.trace.load().max(initial=0)),
        refused=0,
        peak_live_bytes=live,
        peak_reserved_bytes=reserved,
        fragmentation=simulation.fragmentation,
        internal_fragmentation=None if real else (live - served) / whole,
        external_fragmentation=None if real else (reserved - live) / whole,
        driver_calls=simulation.driver_calls,
        largest_free_bytes=simulation.largest_free_bytes,
        fits=False if failure is not None else None if limit_bytes is None or not known.is_whole else True,
        history=known.history,
        failed_at=failure,
        seconds=seconds,
    )


def _failure(simulation: Simulation, limit_bytes: int | None, before_bytes: int) -> Failure | None:
    """Return the first request that does not fit; ``before_bytes`` were reserved before the first event."""
    refused = np.flatnonzero(simulation.trace.kind == EventType.REFUSED)  # only in a recorded simulation
    event = int(refused[0]) if len(refused) else simulation.failed_at
    if event is None:
        if limit_bytes is None or simulation.peak_reserved_bytes <= limit_bytes:
            return None
        event = _first_alloc(
            simulation.trace, int(np.argmax(simulation.reserved > limit_bytes))
        )  # 0: no limit
    real = len(refused) > 0
    before = not real and limit_bytes is not None and before_bytes > limit_bytes
    return Failure(event, int(simulation.trace.size[event]), *place_of(simulation.trace, event), real, before)


def _first_alloc(trace: Trace, event: int) -> int:
    """Return the first alloc at or after the reservation of a segment, which caused it."""
    later = np.flatnonzero(trace.kind[event:] == EventType.ALLOC)
    return event + int(later[0]) if len(later) else event


def parse_allocator(text: str) -> AllocatorSpec:
    """Parse the name and settings of an allocator.

    Examples are "pytorch" and "pytorch:max_split_size_mb=128,garbage_collection_threshold=0.8".
    Values are numbers, true, false, none, or sizes such as 2MiB. Text without "=", as in
    ``PYTORCH_CUDA_ALLOC_CONF``, is passed unchanged to an allocator that has a setting ``conf``.

    Raises:
        ValueError: the allocator or a setting does not exist, or a value is not accepted.
    """
    name, _, rest = text.partition(":")
    if name not in ALLOCATORS and (name != RECORDED or rest):
        raise ValueError(f"no allocator {name!r}; there are {', '.join((RECORDED, *ALLOCATORS))}")
    if name == RECORDED:
        return AllocatorSpec(name)
    known = [field.name for field in dataclasses.fields(ALLOCATORS[name]) if field.init]  # type: ignore[arg-type]
    settings = {"conf": rest} if rest and "=" not in rest and "conf" in known else _settings(rest)
    if unknown := sorted(settings.keys() - set(known)):
        raise ValueError(f"{name} has no setting {', '.join(unknown)}; there are {', '.join(known)}")
    try:
        ALLOCATORS[name](**settings)  # checks the settings without a trace
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None
    return AllocatorSpec(name, settings)


def _settings(text: str) -> dict[str, Any]:
    settings = {}
    for part in filter(None, text.split(",")):
        key, given, value = part.partition("=")
        if not given:
            raise ValueError(f"{part!r} is not KEY=VALUE")
        settings[key.strip()] = _value(value.strip())
    return settings


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for convert in (int, float, parse_bytes):
        with contextlib.suppress(ValueError, UsageError):
            return convert(text)
    return text

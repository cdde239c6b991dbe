"""Comparison of many allocators on one trace, a row each."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mempool.analysis.caveats import place_of
from mempool.simulate import ALLOCATORS, simulate
from solvers.simulators.recorded import recorded
from traces import EventType
from traces.completeness import completeness
from traces.refused import with_attempts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from solvers.simulators import Simulation
    from traces import Trace
    from traces.completeness import History

#: Name of the trace's own allocator, as recorded.
RECORDED = "recorded"


@dataclass(frozen=True)
class Choice:
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
        recorded: the request failed during the recording, whatever the limit is here.
        before: more than the limit was reserved before the first recorded event, for an unknown request;
            ``event`` and ``size_bytes`` are then of the first alloc.
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

    If the allocator runs out of memory, ``failed_at`` names the request, and the figures are those without a
    limit. If the allocator's own settings limit the memory, the figures cover only the served requests.

    Attributes:
        allocator: name of the allocator.
        device: the device of the events.
        settings: the given settings.
        peak_load_bytes: most requested bytes alive together; includes requests that were refused during the
            recording, except for the recorded allocator.
        refused: number of included requests that were refused during the recording.
        peak_live_bytes: the peak load after the allocator's rounding.
        peak_reserved_bytes: most bytes held from the device.
        fragmentation: 1 - peak of the requested and served bytes / peak reserved; the sum of the two parts
            below.
        internal_fragmentation: fraction of the peak reserved bytes that is lost to rounding; None for the
            recorded allocator, whose trace has only the requested bytes.
        external_fragmentation: fraction of the peak reserved bytes that no buffer uses; None for the recorded
            allocator.
        driver_calls: calls to the device to take or give back memory.
        largest_free_bytes: the largest free block when the most is reserved, and among those moments the most
            in use; None where the recording does not tell.
        fits: true if every request, including the refused ones, fits in the limit, or in the limit of the
            allocator's own settings. None without any limit if all requests fit, and if all recorded requests
            fit but a part of the history is missing.
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
class Unable:
    """An allocator that cannot be compared on these events; ``error`` gives the reason in one line."""

    allocator: str
    device: int
    settings: dict[str, Any]
    error: str

    def to_dict(self) -> dict[str, Any]:
        """Return the columns of a `Row`, with None for unknown values."""
        return dict.fromkeys(column.name for column in fields(Row)) | asdict(self)


def compare(
    trace: Trace,
    choices: Sequence[Choice] | None = None,
    *,
    limit_bytes: int | None = None,
    told: Callable[[str], object] = lambda _: None,
) -> Iterator[Row | Unable]:
    """Simulate allocators on a trace; yield a row for each device and allocator as soon as ready.

    Args:
        trace: events; each device is simulated separately.
        choices: the allocators to compare; None for the recorded one, if the trace contains enough, and all
            that exist.
        limit_bytes: memory of each device.
        told: called with the name of each allocator before the simulation.

    Raises:
        TraceError: the trace contradicts itself.
    """
    trace.validate()
    silent = _without_recorded(trace) if choices is not None and Choice(RECORDED) in choices else set()
    for device in trace.devices:
        events = trace if len(trace.devices) == 1 else trace.on_device(device)
        attempts, of_events = with_attempts(events)
        rows = trace.rows_on_device(device)
        for choice in _all(events) if choices is None else choices:
            real = choice.allocator == RECORDED
            if real and device in silent:
                continue
            told(choice.allocator)
            asked, own = (events, rows) if real else (attempts, rows[of_events])
            try:
                row = _row(asked, choice, device, limit_bytes)
                row = replace(row, refused=0 if real else len(attempts) - len(events))
            except ValueError as error:  # unknown settings, or settings that do not suit these events
                yield Unable(choice.allocator, device, choice.settings, " ".join(str(error).split()))
                continue
            failed = row.failed_at
            if failed is not None:
                row = replace(row, failed_at=replace(failed, event=int(own[failed.event])))
            yield row


def _without_recorded(trace: Trace) -> set[int]:
    """Return the devices of which nothing is known of `RECORDED`, if others tell it.

    A profiler's trace tells reserved bytes of GPUs, and none of the host.
    """
    known = {device: recorded(trace.on_device(device)) is not None for device in trace.devices}
    return {device for device, told in known.items() if not told} if any(known.values()) else set()


def _all(trace: Trace) -> list[Choice]:
    known = [Choice(RECORDED)] if recorded(trace) is not None else []
    return known + [Choice(name) for name in ALLOCATORS]


def _simulation(trace: Trace, choice: Choice, limit_bytes: int | None) -> Simulation:
    if choice.allocator != RECORDED:
        return simulate(trace, choice.allocator, limit_bytes=limit_bytes, **choice.settings)
    found = recorded(trace)
    if found is None:
        raise ValueError(
            "the trace does not tell what its allocator reserved, so nothing is known of `recorded`"
        )
    return found


def _row(trace: Trace, choice: Choice, device: int, limit_bytes: int | None) -> Row:
    begin = time.process_time()
    made = _simulation(trace, choice, limit_bytes)
    seconds = time.process_time() - begin
    known = completeness(trace, device)
    failure = _failure(made, limit_bytes, known.reserved_before_bytes if choice.allocator == RECORDED else 0)
    if made.failed_at is not None and limit_bytes is not None:
        with contextlib.suppress(ValueError):  # some allocators need a limit
            made = _simulation(trace, choice, None)
    served = int(made.requested.max(initial=0))  # less than the load if allocs failed
    live, reserved = made.peak_live_bytes, made.peak_reserved_bytes
    whole, real = max(reserved, 1), choice.allocator == RECORDED
    return Row(
        allocator=choice.allocator,
        device=device,
        settings=choice.settings,
        peak_load_bytes=int(made.trace.load().max(initial=0)),
        refused=0,
        peak_live_bytes=live,
        peak_reserved_bytes=reserved,
        fragmentation=made.fragmentation,
        internal_fragmentation=None if real else (live - served) / whole,
        external_fragmentation=None if real else (reserved - live) / whole,
        driver_calls=made.driver_calls,
        largest_free_bytes=made.largest_free_bytes,
        fits=False if failure is not None else None if limit_bytes is None or not known.is_whole else True,
        history=known.history,
        failed_at=failure,
        seconds=seconds,
    )


def _failure(made: Simulation, limit_bytes: int | None, before_bytes: int) -> Failure | None:
    """Return the first request that does not fit; ``before_bytes`` were reserved before the first event."""
    refused = np.flatnonzero(made.trace.kind == EventType.REFUSED)  # only in a recorded simulation
    event = int(refused[0]) if len(refused) else made.failed_at
    if event is None:
        if limit_bytes is None or made.peak_reserved_bytes <= limit_bytes:
            return None
        event = _first_alloc(made.trace, int(np.argmax(made.reserved > limit_bytes)))  # no such limit then
    real = len(refused) > 0
    before = not real and limit_bytes is not None and before_bytes > limit_bytes
    return Failure(event, int(made.trace.size[event]), *place_of(made.trace, event), real, before)


def _first_alloc(trace: Trace, event: int) -> int:
    """Return the first alloc at or after an event: the alloc that a segment was reserved for."""
    later = np.flatnonzero(trace.kind[event:] == EventType.ALLOC)
    return event + int(later[0]) if len(later) else event

"""One trace under many allocators, a row each."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mempool.analysis.caveats import place_of
from mempool.what_if import ALLOCATORS, simulate
from solvers.simulators.recorded import recorded
from traces import Kind
from traces.completeness import completeness
from traces.refused import with_attempts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from solvers.simulators import Simulation
    from traces import Trace
    from traces.completeness import History

#: What the trace's own allocator did goes by this name.
RECORDED = "recorded"


@dataclass(frozen=True)
class Choice:
    """An allocator by its name in `mempool.what_if.ALLOCATORS`, or `RECORDED`, with settings."""

    allocator: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """The first request that did not fit.

    Attributes:
        event: its row.
        size_bytes: bytes asked for.
        operation: its operation, None where unknown.
        frame: its source line without folders, None where unknown.
        recorded: it failed when it was recorded, whatever the limit is here.
        before: more than the limit was reserved before the first event that is recorded, so nobody knows
            which request it was for; ``event`` and ``size_bytes`` are those of the first alloc.
    """

    event: int
    size_bytes: int
    operation: str | None
    frame: str | None
    recorded: bool
    before: bool


@dataclass(frozen=True)
class Row:
    """One allocator on one device's events.

    Where the allocator runs out of memory, ``failed_at`` says when, and the figures are those that it would
    have without a limit; those of what it served, where its own settings limit it.

    Attributes:
        allocator: its name.
        device: whose events.
        settings: those that were given.
        peak_load_bytes: most bytes asked for that were alive together, those of requests included that were
            refused in truth, but for what was recorded.
        refused: of such requests, how many are included.
        peak_live_bytes: the same as the allocator rounds them.
        peak_reserved_bytes: most bytes held from the device.
        fragmentation: 1 - peak of the bytes asked for and served / peak reserved: the sum of the two parts.
        internal_fragmentation: of what is reserved at most, the part lost to rounding; None of what was
            recorded, which tells the bytes asked for alone.
        external_fragmentation: of what is reserved at most, the part that nobody lives in; None likewise.
        driver_calls: calls to the device to take or give back memory.
        largest_free_bytes: the largest free block when most is reserved, and most of it in use; None where
            the recording does not tell.
        fits: whether every request, those included that were refused in truth, fits in the limit, or in that
            of the allocator's own settings; None where there is none and all fit, and where all that was
            recorded fits but a part of the history is missing.
        history: the part of the device's history that was recorded, a `traces.completeness.History`.
        failed_at: the first request that does not fit; its event is a row of the whole trace. Of what was
            recorded, the first that was refused.
        seconds: of processor, for the simulation.
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
        """The columns by name, ready for JSON, and no error."""
        return {**asdict(self), "error": None}


@dataclass(frozen=True)
class Unable:
    """An allocator that cannot be compared on these events; ``error`` says why, in a line."""

    allocator: str
    device: int
    settings: dict[str, Any]
    error: str

    def to_dict(self) -> dict[str, Any]:
        """The columns of a `Row`, without what is not known."""
        return dict.fromkeys(column.name for column in fields(Row)) | asdict(self)


def compare(
    trace: Trace,
    choices: Sequence[Choice] | None = None,
    *,
    limit_bytes: int | None = None,
    told: Callable[[str], object] = lambda _: None,
) -> Iterator[Row | Unable]:
    """Simulate allocators on a trace, a row for each device and allocator, as they become known.

    Args:
        trace: events; each device by itself.
        choices: what to compare; None for what was recorded, if the trace tells it, and all that there are.
        limit_bytes: what each device has.
        told: called with the name of each allocator before it is simulated.

    Raises:
        TraceError: the trace contradicts itself.
    """
    trace.validate()
    silent = _without_recorded(trace)
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
            except ValueError as error:  # settings that there are not, or that these events do not go with
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
        with contextlib.suppress(ValueError):  # some do not go without a limit
            made = _simulation(trace, choice, None)
    served = int(made.requested.max(initial=0))  # less than the load where allocs failed
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
    refused = np.flatnonzero(made.trace.kind == Kind.REFUSED)  # of what was recorded alone
    event = int(refused[0]) if len(refused) else made.failed_at
    if event is None:
        if limit_bytes is None or made.peak_reserved_bytes <= limit_bytes:
            return None
        event = _first_alloc(made.trace, int(np.argmax(made.reserved > limit_bytes)))  # recorded without it
    real = len(refused) > 0
    before = not real and limit_bytes is not None and before_bytes > limit_bytes
    return Failure(event, int(made.trace.size[event]), *place_of(made.trace, event), real, before)


def _first_alloc(trace: Trace, event: int) -> int:
    """The first alloc from an event on: the one for which a segment was reserved."""
    later = np.flatnonzero(trace.kind[event:] == Kind.ALLOC)
    return event + int(later[0]) if len(later) else event

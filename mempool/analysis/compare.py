"""One trace under many allocators, a row each."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mempool.what_if import ALLOCATORS, simulate
from solvers.simulators.recorded import recorded
from traces import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from solvers.simulators import Simulation
    from traces import Trace

#: What the trace's own allocator did goes by this name.
RECORDED = "recorded"


@dataclass(frozen=True)
class Choice:
    """An allocator by its name in `mempool.what_if.ALLOCATORS`, or `RECORDED`, with settings."""

    allocator: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """The first alloc that did not fit: its row, bytes, and operation where it was recorded."""

    event: int
    size_bytes: int
    operation: str | None


@dataclass(frozen=True)
class Row:
    """One allocator on one device's events.

    Where the allocator runs out of memory, ``failed_at`` says when, and the figures are those that it would
    have without a limit; those of what it served, where its own settings limit it.

    Attributes:
        allocator: its name.
        device: whose events.
        settings: those that were given.
        peak_load_bytes: most bytes asked for that were alive together.
        peak_live_bytes: the same as the allocator rounds them.
        peak_reserved_bytes: most bytes held from the device.
        fragmentation: 1 - peak of the bytes asked for and served / peak reserved: the sum of the two parts.
        internal_fragmentation: of what is reserved at most, the part lost to rounding.
        external_fragmentation: of what is reserved at most, the part that nobody lives in.
        driver_calls: calls to the device to take or give back memory.
        largest_free_bytes: the largest free block when most is reserved, and most of it in use.
        fits: whether every alloc fits in the limit, or in that of the allocator's own settings; None where
            there is none and all fit.
        failed_at: the first alloc that does not; its event is a row of the whole trace.
        seconds: of processor, for the simulation.
    """

    allocator: str
    device: int
    settings: dict[str, Any]
    peak_load_bytes: int
    peak_live_bytes: int
    peak_reserved_bytes: int
    fragmentation: float
    internal_fragmentation: float
    external_fragmentation: float
    driver_calls: int
    largest_free_bytes: int
    fits: bool | None
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
    for device in trace.devices:
        events = trace if len(trace.devices) == 1 else trace.on_device(device)
        rows = trace.rows_on_device(device)
        for choice in _all(events) if choices is None else choices:
            told(choice.allocator)
            try:
                row = _row(events, choice, device, limit_bytes)
            except ValueError as error:  # settings that there are not, or that these events do not go with
                yield Unable(choice.allocator, device, choice.settings, " ".join(str(error).split()))
                continue
            failed = row.failed_at
            if failed is not None:
                row = replace(row, failed_at=replace(failed, event=int(rows[failed.event])))
            yield row


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
    failure = _failure(made, limit_bytes)
    if made.failed_at is not None and limit_bytes is not None:
        with contextlib.suppress(ValueError):  # some do not go without a limit
            made = _simulation(trace, choice, None)
    served = int(made.requested.max(initial=0))  # less than the load where allocs failed
    live, reserved = made.peak_live_bytes, made.peak_reserved_bytes
    whole = max(reserved, 1)
    return Row(
        allocator=choice.allocator,
        device=device,
        settings=choice.settings,
        peak_load_bytes=int(made.trace.load().max(initial=0)),
        peak_live_bytes=live,
        peak_reserved_bytes=reserved,
        fragmentation=made.fragmentation,
        internal_fragmentation=(live - served) / whole,
        external_fragmentation=(reserved - live) / whole,
        driver_calls=made.driver_calls,
        largest_free_bytes=made.largest_free_bytes,
        fits=None if limit_bytes is None and failure is None else failure is None,
        failed_at=failure,
        seconds=seconds,
    )


def _failure(made: Simulation, limit_bytes: int | None) -> Failure | None:
    event = made.failed_at
    if event is None:
        if limit_bytes is None or made.peak_reserved_bytes <= limit_bytes:
            return None
        event = _first_alloc(made.trace, int(np.argmax(made.reserved > limit_bytes)))  # recorded without it
    trace = made.trace
    name = int(trace.operation[event])
    return Failure(event, int(trace.size[event]), trace.names[name] if name >= 0 else None)


def _first_alloc(trace: Trace, event: int) -> int:
    """The first alloc from an event on: the one for which a segment was reserved."""
    later = np.flatnonzero(trace.kind[event:] == Kind.ALLOC)
    return event + int(later[0]) if len(later) else event

"""Test that a detected iteration is a trace's main loop, not a part such as a repeated network layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from traces import Trace
    from traces.iterations.pattern import Pattern

#: Allocations up to this many bytes are ignored in the search for iterations, see
#: `traces.iterations.pattern.find_patterns`.
_SMALL_BYTES = 512


def is_main(kinds: Sequence[Pattern], trace: Trace) -> bool:
    """Return true if the iterations are a main part of the trace.

    Iterations delimited by the user's marks always are. Otherwise all iterations together must hold at least
    half of the allocations and half of the allocated bytes, and the load while they run, including
    longer-lived
    buffers, must reach half of the trace's peak load.

    Args:
        kinds: the variants, at least one.
        trace: the events.

    Raises:
        TraceError: the trace contradicts itself.
    """
    from traces import EventType

    if not found_only(trace) and ((trace.kind == EventType.MARK) & (trace.category < 0)).any():
        return True
    sizes = trace.size[(trace.kind == EventType.ALLOC) & (trace.size > _SMALL_BYTES)]
    if 2 * sum(one.iterations * len(one.buffers) for one in kinds) < len(sizes):
        return False
    asked = sum(one.iterations * float(one.buffers.size.sum(dtype=float)) for one in kinds)
    if 2 * asked < sizes.sum(dtype=float):
        return False
    load = trace.load()
    begin, end = min(int(one.begins[0]) for one in kinds), max(int(one.event.max()) for one in kinds)
    return bool(2 * float(load[begin : end + 1].max()) >= float(load.max()))


def found_only(trace: Trace) -> bool:
    """Return true if iterations are delimited only by automatic marks, and by no marks of the user."""
    from traces.iterations.windows import iteration_marks

    return len(iteration_marks(trace, found=True)) > 0 and len(iteration_marks(trace)) == 0


def passed_over(minor: Pattern) -> str:
    """Return the text about an iteration that is no main part of its trace."""
    return f"{len(minor.buffers):,} allocations, {minor.iterations} alike, are a small part"

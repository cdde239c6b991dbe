"""Whether an iteration that was found is what a trace is about, or a layer of a network that repeats too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from traces import Trace
    from traces.pattern import Pattern

#: Smaller allocs are passed over where iterations are looked for, see `traces.pattern.find_patterns`.
_SMALL_BYTES = 512


def is_main(kinds: Sequence[Pattern], trace: Trace) -> bool:
    """Whether the iterations are a main part of the trace that they were found in.

    They are where marks, which somebody set, tell them apart. Else all of them together must hold at least
    half of the allocs and of the bytes that these ask for, and the load while they last, with what stays
    meanwhile, must get to half of the trace's peak load.

    Args:
        kinds: one at least.
        trace: the events.

    Raises:
        TraceError: the trace contradicts itself.
    """
    from traces import Kind

    if not found_only(trace) and ((trace.kind == Kind.MARK) & (trace.category < 0)).any():
        return True
    sizes = trace.size[(trace.kind == Kind.ALLOC) & (trace.size > _SMALL_BYTES)]
    if 2 * sum(one.iterations * len(one.buffers) for one in kinds) < len(sizes):
        return False
    asked = sum(one.iterations * float(one.buffers.size.sum(dtype=float)) for one in kinds)
    if 2 * asked < sizes.sum(dtype=float):
        return False
    load = trace.load()
    begin, end = min(int(one.begins[0]) for one in kinds), max(int(one.event.max()) for one in kinds)
    return bool(2 * float(load[begin : end + 1].max()) >= float(load.max()))


def found_only(trace: Trace) -> bool:
    """Whether a trace has marks that nobody set, and no others that tell iterations apart."""
    from traces.windows import iteration_marks

    return len(iteration_marks(trace, found=True)) > 0 and len(iteration_marks(trace)) == 0


def passed_over(minor: Pattern) -> str:
    """What is said of an iteration that is no main part of its trace."""
    return f"{len(minor.buffers):,} allocations, {minor.iterations} alike, are a small part"

"""Whether an iteration that was found is what a trace is about, or a layer of a network that repeats too."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traces import Trace
    from traces.pattern import Pattern

#: Smaller allocs are passed over where iterations are looked for, see `traces.pattern.find_patterns`.
_SMALL_BYTES = 512


def is_main(pattern: Pattern, trace: Trace) -> bool:
    """Whether the iterations are a main part of the trace that they were found in.

    They are where marks, which somebody set, tell them apart. Else all of them together must hold at least
    half of the allocs and of the bytes that these ask for, and the load while they last, with what stays
    meanwhile, must get to half of the trace's peak load.

    Raises:
        TraceError: the trace contradicts itself.
    """
    from traces import Kind

    if (trace.kind == Kind.MARK).any():
        return True
    sizes = trace.size[(trace.kind == Kind.ALLOC) & (trace.size > _SMALL_BYTES)]
    own = pattern.buffers.size
    if 2 * pattern.iterations * len(own) < len(sizes):
        return False
    if 2 * pattern.iterations * own.sum(dtype=float) < sizes.sum(dtype=float):
        return False
    load = trace.load()
    during = load[int(pattern.begins[0]) : int(pattern.event.max()) + 1]
    return bool(2 * float(during.max()) >= float(load.max()))


def passed_over(minor: Pattern) -> str:
    """What is said of an iteration that is no main part of its trace."""
    return f"{len(minor.buffers):,} allocations, {minor.iterations} alike, are a small part"

"""Removal of contradictory events from a trace."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from traces import EventType, Trace
from traces.transforms import without_contradictions
from traces.workload import generate

EVENTS = st.lists(
    st.tuples(st.sampled_from([*EventType, 9]), st.integers(-1, 3), st.integers(-1, 5)), max_size=30
)


@given(EVENTS)
def test_remaining_events_are_valid_and_removed_events_are_counted(
    events: list[tuple[int, int, int]],
) -> None:
    """Compare with a loop over the events: a buffer may be born once, used while alive and freed."""
    kind, buffer, size = zip(*events, strict=True) if events else ((), (), ())
    trace = Trace.of(kind, buffer, size)
    skipped = Counter[str]()
    left = without_contradictions(trace, skipped)
    left.validate()
    alive: dict[int, bool] = {}
    kept = []
    for event in events:
        what, whose, bytes_ = event
        sized = what in (EventType.ALLOC, EventType.RESERVE, EventType.RELEASE, EventType.REFUSED)
        if not 0 <= what <= max(EventType) or bytes_ < 0 or (bytes_ and not sized):
            continue
        if what >= EventType.MARK:
            if whose == -1:
                kept.append(event)
            continue
        if (
            whose < 0
            or (what == EventType.ALLOC) == (whose in alive)
            or (what != EventType.ALLOC and not alive[whose])
        ):
            continue
        alive[whose] = what != EventType.FREE
        kept.append(event)
    assert list(zip(left.kind.tolist(), left.buffer.tolist(), left.size.tolist(), strict=True)) == kept
    assert skipped.total() == len(events) - len(kept)


def test_valid_trace_is_unchanged() -> None:
    trace = generate(50, 1, accesses=True)
    assert without_contradictions(trace, Counter()) is trace

"""Refused requests as buffers that are allocated and freed at once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from traces import EventType, Trace
from traces.transforms import refused_as_buffers


@given(
    st.lists(
        st.tuples(st.sampled_from([EventType.ALLOC, EventType.REFUSED, EventType.MARK]), st.integers(0, 9))
    )
)
def test_attempts_raise_the_load_for_a_single_event_only(events: list[tuple[int, int]]) -> None:
    kind = [what for what, _ in events]
    buffer = [at if what == EventType.ALLOC else -1 for at, what in enumerate(kind)]
    size = [bytes_ if what != EventType.MARK else 0 for what, bytes_ in events]
    trace = Trace.of(kind, buffer, size)
    attempted, rows = refused_as_buffers(trace)
    attempted.validate()
    refused = trace.kind == EventType.REFUSED
    assert not (attempted.kind == EventType.REFUSED).any()
    assert len(attempted) == len(trace) + refused.sum()
    last = np.flatnonzero(np.append(rows[1:] != rows[:-1], True))[: len(trace)]
    np.testing.assert_array_equal(attempted.load()[last], trace.load())
    first = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))[: len(trace)]
    np.testing.assert_array_equal(attempted.load()[first] - trace.load(), np.where(refused, trace.size, 0))

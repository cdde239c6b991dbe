"""Separation of private pools, as of streams."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from traces import EventType, Trace
from traces.transforms import pools_as_streams


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1))
def test_pairs_of_pool_and_stream_become_different_streams(pairs: list[tuple[int, int]]) -> None:
    """A free is in the pool of its alloc; a trace without private pools stays unchanged."""
    pool, stream = (list(column) * 2 for column in zip(*pairs, strict=True))
    kind = [EventType.ALLOC] * len(pairs) + [EventType.FREE] * len(pairs)
    trace = Trace.of(
        kind,
        [*range(len(pairs))] * 2,
        [8] * len(pairs) + [0] * len(pairs),
        stream=stream,
        pool=pool[: len(pairs)] + [0] * len(pairs),
    )
    found = pools_as_streams(trace).stream
    if not any(pool):
        np.testing.assert_array_equal(found, trace.stream)
    same = {pair: int(at) for pair, at in zip(pairs * 2, found, strict=True)}
    assert found.tolist() == [same[pair] for pair in pairs * 2]
    assert len(set(same.values())) == len(same)

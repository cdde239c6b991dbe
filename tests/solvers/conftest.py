"""Random buffers: ``st.from_type(Buffers)`` draws every feature at once, small enough for brute force."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st

from traces.buffers import Buffers

BENCH = Path(__file__).parents[3] / "shared" / "bench" / "minimalloc"


@st.composite
def small_buffers(draw: st.DrawFn) -> Buffers:
    n = draw(st.integers(0, 6))
    period = draw(st.none() | st.integers(1, 8))
    last = 9 if period is None else period - 1
    longest = 9 if period is None else 3 * period

    def column(element: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(element, min_size=n, max_size=n))

    start = column(st.integers(0, last))
    end = [s + length for s, length in zip(start, column(st.integers(0, longest)), strict=True)]
    alignment = column(st.sampled_from([1, 1, 2, 4]))
    fixed = [a * k if k < 3 else -1 for a, k in zip(alignment, column(st.integers(0, 20)), strict=True)]
    gaps = [
        (i, draw(st.integers(s, e - 1)), e) if draw(st.booleans()) else (i, s + 1, min(s + 3, e))
        for i, (s, e) in enumerate(zip(start, end, strict=True))
        if e - s >= 2 and draw(st.integers(0, 3)) == 0
    ]
    return Buffers.of(
        start,
        end,
        column(st.integers(0, 5)),
        alignment=alignment,
        offset=fixed if draw(st.integers(0, 3)) == 0 else -1,
        group=column(st.integers(0, 1)) if draw(st.integers(0, 2)) == 0 else 0,
        persistent=[k == 0 for k in column(st.integers(0, 9))],
        gaps=gaps,
        period=period,
    )


st.register_type_strategy(Buffers, small_buffers())


@pytest.fixture
def bench() -> Path:
    """Folder of the public instances, if present."""
    if not BENCH.is_dir():
        pytest.skip("the public instances are not beside this repository")
    return BENCH

"""Terminal pictures: every cell is right, and the picture fits the terminal."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mempool.cli.plot import (
    address_grid,
    load_plot,
)
from solvers import Stop, peak_load, solve
from traces import Buffers


@st.composite
def _buffers(draw: st.DrawFn) -> Buffers:
    period = draw(st.one_of(st.none(), st.integers(4, 20)))
    count = draw(st.integers(1, 12))
    start = draw(st.lists(st.integers(0, (period or 20) - 1), min_size=count, max_size=count))
    length = draw(st.lists(st.integers(0, 2 * (period or 20)), min_size=count, max_size=count))
    size = draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    return Buffers.of(start, np.add(start, length), size, period=period)


@given(_buffers())
def test_cell_shows_the_buffer_at_its_middle(buffers: Buffers) -> None:
    """Each cell's buffer is alive at the cell's time and covers the cell's address."""
    plan = solve(buffers, stop=Stop(nodes=1000))
    assert plan.offset is not None
    width, height = 17, 13
    grid = address_grid(buffers, plan, width=width, height=height)
    if plan.arena_bytes == 0:
        assert (grid == -1).all()
        return
    period = buffers.period
    first, last = (int(buffers.start.min()), int(buffers.end.max())) if period is None else (0, period)
    for column in range(width):
        time = first + (last - first) * (column + 0.5) / width
        for row in range(height):
            address = (height - row - 0.5) * plan.arena_bytes / height
            holders = [
                at
                for at in range(len(buffers))
                for turn in range(4 if period else 1)
                if buffers.start[at] <= time + turn * (period or 0) < buffers.end[at]
                and 0 <= address - plan.offset[at, -turn % plan.columns] < buffers.size[at]
            ]
            assert holders == ([] if grid[row, column] < 0 else [grid[row, column]])


@given(_buffers(), st.integers(1, 60), st.integers(1, 12), st.booleans())
def test_load_plot_fits_and_reaches_the_top_only_at_the_peak(
    buffers: Buffers, width: int, height: int, ascii_only: bool
) -> None:
    lines = load_plot(buffers, width=width, height=height, ascii_only=ascii_only).split("\n")
    assert len(lines) == height + 1
    assert max(len(line) for line in lines[:-1]) <= width + 13
    full = "#" if ascii_only else "█"
    assert (full in lines[0]) == (peak_load(buffers) > 0)
    assert "\n".join(lines).isascii() == ascii_only

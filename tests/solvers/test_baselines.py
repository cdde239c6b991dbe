"""Published baselines: offsets equal to short models in Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solvers import solve
from traces.buffers import Buffers

if TYPE_CHECKING:
    from collections.abc import Callable

Ranges = list[tuple[int, int]]


@st.composite
def on_a_line(draw: st.DrawFn, *, plain: bool = False) -> Buffers:
    """Up to ten buffers; with ``plain`` neither gaps nor fixed offsets."""
    n = draw(st.integers(1, 10))

    def column(element: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(element, min_size=n, max_size=n))

    start = column(st.integers(0, 12))
    end = [s + length for s, length in zip(start, column(st.integers(1, 8)), strict=True)]
    gaps = [(i, s + 1, s + 2) for i, (s, e) in enumerate(zip(start, end, strict=True)) if e - s > 4]
    size, alignment = column(st.integers(1, 9)), column(st.sampled_from([1, 1, 2, 4]))
    fixed = -1 if plain else [16 if k == 0 else -1 for k in column(st.integers(0, 20))]
    return Buffers.of(
        start, end, size, alignment=alignment, offset=fixed, gaps=[] if plain or draw(st.booleans()) else gaps
    )


def times(buffers: Buffers, i: int) -> set[int]:
    gaps = np.flatnonzero(buffers.gap_buffer == i)
    away = {t for g in gaps for t in range(buffers.gap_start[g], buffers.gap_end[g])}
    return set(range(buffers.start[i], buffers.end[i])) - away


def gaps_in(occupied: Ranges, alignment: int) -> tuple[Ranges, int]:
    """Return the gaps between the ranges from an aligned address on, lowest first, and the address on top."""
    free, at = list[tuple[int, int]](), 0
    for low, high in sorted(occupied):
        free.append((at, low))
        at = max(at, -(-high // alignment) * alignment)
    return free, at


def lowest(occupied: Ranges, size: int, alignment: int) -> int:
    free, top = gaps_in(occupied, alignment)
    return min([low for low, high in free if high - low >= size], default=top)


def smallest(occupied: Ranges, size: int, alignment: int) -> int:
    free, top = gaps_in(occupied, alignment)
    return min([(high - low, low) for low, high in free if high - low >= size], default=(0, top))[1]


def smallest_between(occupied: Ranges, size: int, alignment: int) -> int:
    """Return the smallest gap; the gap below all ranges counts only where the ranges touch."""
    free, top = gaps_in(occupied, alignment)
    holes = [(low, high) for low, high in free[1:] if high > low]
    fits = [(high - low, low) for low, high in holes or free[:1] if high - low >= size]
    return min(fits, default=(0, top))[1]


def by_size(buffers: Buffers, i: int) -> Any:
    return -buffers.size[i], buffers.start[i], i


def by_time(buffers: Buffers, i: int) -> Any:
    return buffers.start[i], i


def always_first(buffers: Buffers, i: int) -> Any:
    always = len(times(buffers, i)) == buffers.end.max() - buffers.start.min()
    return (False, i) if always else (True, by_size(buffers, i))


@pytest.mark.parametrize(
    ("name", "order", "rule"),
    [
        ("first_fit", by_size, lowest),
        ("best_fit", by_size, smallest),
        ("smartpool", by_size, smallest_between),
        ("greedy_by_size", always_first, smallest),
        ("best_fit_in_time", by_time, smallest),
    ],
)
@given(buffers=on_a_line())
def test_each_buffer_lies_at_the_offset_of_the_baselines_rule(
    name: str, order: Callable[[Buffers, int], Any], rule: Callable[..., int], buffers: Buffers
) -> None:
    plan = solve(buffers, solver=name)
    if plan.offset is None:
        assert "fixed offset" in plan.reason
        return
    offset: dict[int, int] = {}
    for i in sorted(range(len(buffers)), key=lambda i: (buffers.offset[i] < 0, *order(buffers, i))):
        alive = [j for j in offset if times(buffers, i) & times(buffers, j)]
        occupied = [(offset[j], offset[j] + int(buffers.size[j])) for j in alive]
        found = rule(occupied, int(buffers.size[i]), int(buffers.alignment[i]))
        offset[i] = int(buffers.offset[i]) if buffers.offset[i] >= 0 else found
    assert plan.offset[:, 0].tolist() == [offset[i] for i in range(len(buffers))]


@pytest.mark.parametrize("key", ["lifetime", "size", "area"])
@given(buffers=on_a_line(plain=True))
def test_lowest_valley_gets_the_first_buffer_within(key: str, buffers: Buffers) -> None:
    plan = solve(buffers, solver=f"skyline_{key}")
    assert plan.offset is not None
    start, length = buffers.start, buffers.end - buffers.start
    columns = {
        "lifetime": (-length, -buffers.size),
        "size": (-buffers.size, start),
        "area": (-length * buffers.size, start),
    }[key]
    left = sorted(range(len(buffers)), key=lambda i: (*(int(column[i]) for column in columns), i))
    height = dict.fromkeys(range(int(start.min()), int(buffers.end.max())), 0)
    while left:
        low = min(height, key=lambda t: height[t])
        valley = [low]
        while height.get(valley[-1] + 1) == height[low]:
            valley.append(valley[-1] + 1)
        within = [i for i in left if start[i] >= low and buffers.end[i] <= valley[-1] + 1]
        if not within:
            walls = [height[t] for t in (low - 1, valley[-1] + 1) if t in height]
            height |= dict.fromkeys(valley, min(walls))
            continue
        left.remove(chosen := within[0])
        at = -(-height[low] // int(buffers.alignment[chosen])) * int(buffers.alignment[chosen])
        assert plan.offset[chosen, 0] == at
        height |= dict.fromkeys(range(start[chosen], buffers.end[chosen]), at + int(buffers.size[chosen]))

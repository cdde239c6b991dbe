"""Terminal plots: the load over time as a curve of blocks, and addresses over time in colours.

Both plots are ASCII if the output is no terminal or not in UTF-8.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

from mempool.units import binary

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console
    from rich.text import Text

    from solvers import Plan
    from traces import Buffers

_EIGHTHS = " ▁▂▃▄▅▆▇█"
#: Palette in which consecutive colours differ in hue and lightness; `_FREE` is free memory.
_COLOURS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948",
    "#b07aa1", "#9c755f", "#ff9da7", "#86bcb6", "#8cd17d", "#d4a6c8",
)  # fmt: skip
_FREE = "#202428"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def load_plot(buffers: Buffers, *, width: int = 72, height: int = 10, ascii_only: bool = False) -> str:
    """Plot the load over time; each column shows the largest load of its time span."""
    from solvers import load_curve

    times, loads = load_curve(buffers)
    last = buffers.period if buffers.period is not None else int(buffers.end.max(initial=1))
    columns = _largest(
        times, loads, 0 if buffers.period is not None else int(buffers.start.min(initial=0)), last, width
    )
    peak = int(loads.max(initial=0))
    eighths = np.ceil(columns / max(peak, 1) * height * 8).astype(np.int64)
    lines = []
    for row in range(height - 1, -1, -1):
        fill = np.clip(eighths - 8 * row, 0, 8)
        marks = ("#" if n >= 4 else " " for n in fill) if ascii_only else (_EIGHTHS[n] for n in fill)
        label = binary(peak) if row == height - 1 else "0" if row == 0 else ""
        lines.append(f"{label:>11} {'|' if ascii_only else '┤'}{''.join(marks)}".rstrip())
    unit = "allocations" if buffers.period is not None else "events"
    lines.append(f"{'':>11}  0{f'{last:,} {unit}':>{max(width - 1, 0)}}")
    return "\n".join(lines)


def _largest(
    times: NDArray[np.int64], loads: NDArray[np.int64], first: int, last: int, width: int
) -> NDArray[np.float64]:
    """Return the maxima of a step function over ``width`` equal parts of ``[first, last)``."""
    if len(times) == 0:
        return np.zeros(width)
    edges = first + (last - first) * np.arange(width + 1) / width
    begin = np.maximum(np.searchsorted(times, edges[:-1], side="right") - 1, 0)
    end = np.maximum(np.searchsorted(times, edges[1:], side="left"), begin + 1)
    return np.array([loads[a:b].max() for a, b in zip(begin, end, strict=True)], np.float64)


def address_grid(buffers: Buffers, plan: Plan, *, width: int, height: int) -> NDArray[np.int64]:
    """Return the buffer at the centre of each cell: int64[height, width] of rows, -1 for free memory.

    Time increases to the right, and addresses upwards. A circular timeline shows iteration 0 in steady state.
    """
    grid = np.full((height, width), -1, np.int64)
    if plan.offset is None or plan.arena_bytes == 0 or len(buffers) == 0:
        return grid
    period = buffers.period
    first, last = (int(buffers.start.min()), int(buffers.end.max())) if period is None else (0, period)
    offset, arena_bytes = plan.offset, plan.arena_bytes
    address = (np.arange(height)[::-1] + 0.5) * arena_bytes / height
    for column in range(width):
        time = first + (last - first) * (column + 0.5) / width
        row, low = _alive(buffers, offset, time)
        order = np.argsort(low)
        row, low = row[order], low[order]
        at = np.searchsorted(low, address, side="right") - 1
        inside = (
            (at >= 0) & (address < (low + buffers.size[row])[at]) if len(row) else np.zeros(height, np.bool_)
        )
        grid[inside, column] = row[at[inside]]
    return grid


def _alive(
    buffers: Buffers, offset: NDArray[np.int64], time: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return rows and offsets of the buffers alive at a time of iteration 0.

    Instances of earlier iterations are included.
    """
    rows, lows = [], []
    takes = (buffers.size > 0) & ~buffers.persistent
    for back in range(buffers.max_instances + 1 if buffers.period is not None else 1):
        then = time + back * (buffers.period or 0)
        row = np.flatnonzero(takes & (buffers.start <= then) & (then < buffers.end))
        rows.append(row)
        lows.append(offset[row, -back % offset.shape[1]])
    return np.concatenate(rows), np.concatenate(lows)


def address_picture(buffers: Buffers, plan: Plan, *, width: int, height: int) -> Text:
    """Draw addresses over time as half blocks, one colour per buffer; a row of text holds two cells."""
    from rich.text import Text

    grid = address_grid(buffers, plan, width=width, height=2 * height)
    palette = (*_COLOURS, _FREE)
    colour = np.where(grid >= 0, grid * 7 % len(_COLOURS), len(_COLOURS))
    picture = Text(no_wrap=True)
    for row in range(height):
        upper, lower = colour[2 * row], colour[2 * row + 1]
        for a, b in zip(upper.tolist(), lower.tolist(), strict=True):
            picture.append("▀", style=f"{palette[a]} on {palette[b]}")
        picture.append("\n" if row < height - 1 else "")
    return picture


def address_letters(buffers: Buffers, plan: Plan, *, width: int, height: int) -> str:
    """Draw addresses over time as letters, one per buffer (letters repeat), and dots for free memory."""
    grid = address_grid(buffers, plan, width=width, height=height)
    return "\n".join(
        "".join("." if cell < 0 else _LETTERS[cell * 7 % 26] for cell in row) for row in grid.tolist()
    )


def show_load(console: Console, buffers: Buffers) -> None:
    """Print the load over time, as wide as the terminal allows."""
    console.print(
        load_plot(buffers, width=_width(console) - 14, ascii_only=not _utf8(console)),
        markup=False,
        highlight=False,
    )


def show_addresses(console: Console, buffers: Buffers, plan: Plan) -> None:
    """Print addresses over time: in colours on a terminal, as letters elsewhere."""
    if console.is_terminal and _utf8(console) and console.color_system is not None:
        console.print(address_picture(buffers, plan, width=_width(console), height=16))
    else:
        console.print(address_letters(buffers, plan, width=_width(console), height=16), markup=False)


def _width(console: Console) -> int:
    return max(min(console.width, 100), 20) if console.is_terminal else 80


def _utf8(console: Console) -> bool:
    return console.is_terminal and (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf8")

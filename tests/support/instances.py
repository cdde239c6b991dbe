"""Instances of packing problems, by name and by class."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.buffers import Buffers


def crossing(**columns: Any) -> Buffers:
    """Return a smallest instance whose peak load of 8 is unreachable; only a complete search proves this."""
    return Buffers.of([1, 4, 0, 1, 3, 5, 0], [2, 5, 4, 5, 7, 8, 1], [3, 3, 2, 3, 2, 4, 4], **columns)


def hard(n: int = 120, seed: int = 5, **columns: Any) -> Buffers:
    """Return an irregular instance for which no single order reaches the peak load."""
    random = np.random.default_rng(seed)
    start = random.integers(0, 5 * n // 6, n)
    return padded(Buffers.of(start, start + random.integers(1, 60, n), random.integers(1, 50, n), **columns))


def padded(buffers: Buffers) -> Buffers:
    """Return the buffers with one size that is no multiple of the alignment."""
    size, alignment = buffers.size.copy(), buffers.alignment.copy()
    size[0], alignment[0] = size[0] | 1, 2
    return dataclasses.replace(buffers, size=size, alignment=alignment)


def timed(buffers: Buffers) -> list[tuple[set[int], int, int, int]]:
    """Return for each instance that takes memory: times alive, size, alignment, and offset or -1."""
    columns = buffers.max_instances
    circle = None if buffers.period is None else buffers.period * columns
    jobs = []
    for i in np.flatnonzero(~buffers.persistent & (buffers.size > 0)):
        for turn in range(columns):
            gaps = np.flatnonzero(buffers.gap_buffer == i)
            times = set(range(buffers.start[i], buffers.end[i]))
            times -= {t for g in gaps for t in range(buffers.gap_start[g], buffers.gap_end[g])}
            at = {t if circle is None else (t + turn * (buffers.period or 0)) % circle for t in times}
            if at:
                jobs.append((at, int(buffers.size[i]), int(buffers.alignment[i]), int(buffers.offset[i])))
    return jobs


def fits(buffers: Buffers, capacity: int) -> bool:
    """Return whether the buffers fit, by trying every offset for every instance."""
    jobs = sorted(timed(buffers), key=lambda job: -job[3])  # fixed offsets first

    def place(k: int, placed: list[tuple[set[int], int, int]]) -> bool:
        if k == len(jobs):
            return True
        times, size, alignment, fixed = jobs[k]
        for at in range(0, capacity - size + 1, alignment) if fixed < 0 else (fixed,):
            if not 0 <= at <= capacity - size or at % alignment:
                continue
            if all(
                at >= high or at + size <= low or not times & taken for taken, low, high in placed
            ) and place(k + 1, [*placed, (times, at, at + size)]):
                return True
        return False

    return place(0, [])


#: The largest buffer of the small problems, and the rectangle that `tight` cuts.
_LARGEST, _RECTANGLE = 2**20, 2**20
#: Number of rectangles in a pinwheel: five around one another, which no cut from side to side separates.
_PINWHEEL = 5


def loose(n: int, seed: int) -> Buffers:
    """Make random lifetimes and sizes, few buffers alive together.

    In most problems the peak load can be reached, and a quick order reaches the load. The other problems look
    alike, and there a proof is needed that the load is out of reach.
    """
    random = np.random.default_rng(seed)
    start, end = _lifetimes(n, random.uniform(2, 5), random)
    return Buffers.of(start, end, _sizes(n, random))


def tight(n: int, seed: int) -> Buffers:
    """Cut a rectangle of time and addresses into ``n`` buffers at random, with pinwheels among the cuts.

    The peak load is the load at all times, so no byte may be wasted at any time: a puzzle with few solutions,
    on which quick orders fail. The load can be reached, so no proof is needed.
    """
    start, end, low, high = _cut(n, np.random.default_rng(seed))
    return Buffers.of(start, end, high - low)


def aligned(n: int, seed: int) -> Buffers:
    """Make buffers with differing alignments, and sizes that mostly are no multiples of the alignments.

    Some padding cannot be avoided, so the load is out of reach more often than not, and the distance depends
    on the stacking order of the buffers.
    """
    random = np.random.default_rng(seed)
    start, end = _lifetimes(n, random.uniform(2, 8), random)
    coarsest = random.integers(3, 13)
    alignment = 2 ** random.integers(random.integers(0, coarsest), coarsest, n)
    return Buffers.of(start, end, _sizes(n, random), alignment=alignment)


def circular(n: int, seed: int) -> Buffers:
    """Make arcs on a circle, some of them longer than the circle for one seed in four.

    Circular arcs may need more than the load even if all sizes are equal (three arcs of which any two meet
    need three places at a load of two), and every place to cut the circle is crossed by arcs.
    """
    random = np.random.default_rng(seed)
    period = max(4 * n, 1)
    longest = period + (period // 2 if seed % 4 == 3 else 0)
    mean = min(random.uniform(2, 8) / max(n, 1), 0.5) * period
    start = random.integers(0, period, n)
    length = np.minimum(1 + random.exponential(mean, n).astype(np.int64), longest)
    return Buffers.of(start, start + length, _sizes(n, random), period=period)


def pinned(n: int, seed: int) -> Buffers:
    """Make buffers of which some have fixed offsets, taken from a valid plan; the others fit around them.

    For even seeds the plan is a cut as of `tight`: the pinned buffers fit without waste. For odd seeds the
    plan is first fit in a random order: the pinned buffers leave holes, so that the arena often must be
    larger than the load, and than the end of the topmost pinned buffer.
    """
    random = np.random.default_rng(seed)
    if seed % 2 == 0:
        start, end, low, high = _cut(n, random)
        size = high - low
    else:
        start, end = _lifetimes(n, random.uniform(2, 8), random)
        size = _sizes(n, random)
        low = _first_fit(start, end, size)
    fixed = random.random(n) < random.uniform(0.1, 0.5)
    return Buffers.of(start, end, size, offset=np.where(fixed, low, -1))


def flat(n: int, seed: int, *, mean_live: float = 300) -> Buffers:
    """Make random starts, random lifetimes, sizes of 64 B to 4 MiB with uniform logarithms; for any ``n``.

    The problem has none of training's order, and the load is nearly the same at all times, so a plan near the
    load must waste little everywhere.

    Args:
        n: buffers.
        seed: the same seed gives the same buffers.
        mean_live: mean number of buffers alive at one time, at most all of them.
    """
    random = np.random.default_rng(seed)
    start, end = _lifetimes(n, mean_live, random)
    return Buffers.of(start, end, np.exp2(random.uniform(6, 22, n)).astype(np.int64))


def scattered(n: int, seed: int) -> Buffers:
    """Make lifetimes between two random times each; sizes as in `flat`; for any ``n``.

    The load rises to one peak, at which half of all buffers are alive, and falls again.
    """
    random = np.random.default_rng(seed)
    times = random.integers(0, max(2 * n, 1), (n, 2))
    size = np.exp2(random.uniform(6, 22, n)).astype(np.int64)
    return Buffers.of(times.min(axis=1, initial=2 * n), times.max(axis=1, initial=0) + 1, size)


GENERATORS: Mapping[str, Callable[[int, int], Buffers]] = types.MappingProxyType(
    {"loose": loose, "tight": tight, "aligned": aligned, "circular": circular, "pinned": pinned}
)


def _lifetimes(
    n: int, mean_live: float, random: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return starts and ends with ``mean_live`` buffers alive in the mean; two units of time per buffer."""
    mean = min(mean_live / max(n, 1), 0.5) * 2 * n
    start = random.integers(0, max(2 * n, 1), n)
    return start, start + 1 + (2 * mean * random.random(n)).astype(np.int64)


def _sizes(n: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Draw sizes of a random class: a few bytes, any number, kibibytes, or a handful of repeated sizes."""
    kind = random.integers(0, 4)
    if kind == 0:
        return random.integers(1, 33, n)
    if kind == 1:
        return np.exp2(random.uniform(0, np.log2(_LARGEST), n)).astype(np.int64)
    if kind == 2:
        return 1024 * random.integers(1, 257, n)
    return random.choice(random.integers(1, _LARGEST, 4), n)


def _cut(n: int, random: np.random.Generator) -> tuple[NDArray[np.int64], ...]:
    """Cut a rectangle into n rectangles; return their starts, ends, lowest and highest addresses."""
    unit = 2 ** int(random.integers(0, 13))  # all cuts are at multiples of the unit
    whole = (0, max(2 * n, 4), 0, max(_RECTANGLE // unit, 4 * n))
    parts = [whole][:n]
    while len(parts) < n:
        area = np.array([(end - start) * (high - low) for start, end, low, high in parts], np.float64)
        part = parts.pop(int(random.choice(len(parts), p=area / area.sum())))
        parts += _split(part, n - len(parts), random)
    start, end, low, high = np.array(parts, np.int64).reshape(-1, 4).T
    order = random.permutation(n)
    return start[order], end[order], unit * low[order], unit * high[order]


def _split(
    part: tuple[int, int, int, int], most: int, random: np.random.Generator
) -> list[tuple[int, int, int, int]]:
    """Split a rectangle in two, or into a pinwheel if as many parts are wanted and there is room."""
    start, end, low, high = part
    if most >= _PINWHEEL and end - start >= 3 and high - low >= 3 and random.random() < 0.3:
        (a, b), (c, d) = _two_between(start, end, random), _two_between(low, high, random)
        return [(start, b, low, c), (b, end, low, d), (a, end, d, high), (start, a, c, high), (a, b, c, d)]
    if end - start > 1 and (random.random() < 0.5 or high - low == 1):
        at = int(random.integers(start + 1, end))
        return [(start, at, low, high), (at, end, low, high)]
    if high - low == 1:
        return [part]
    at = int(random.integers(low + 1, high))
    return [(start, end, low, at), (start, end, at, high)]


def _two_between(least: int, most: int, random: np.random.Generator) -> tuple[int, int]:
    first = int(random.integers(least + 1, most - 1))
    return first, int(random.integers(first + 1, most))


def _first_fit(
    start: NDArray[np.int64], end: NDArray[np.int64], size: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Place each buffer, in the order given, at the lowest offset that is free for its lifetime."""
    offset = np.zeros(len(start), np.int64)
    for row in range(len(start)):
        meets = np.flatnonzero((start[:row] < end[row]) & (start[row] < end[:row]))
        for other in meets[np.argsort(offset[meets])]:
            if offset[row] + size[row] <= offset[other]:
                break
            offset[row] = max(offset[row], offset[other] + size[other])
    return offset

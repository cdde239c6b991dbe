"""Packing instances of several tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from solvers.packing.plan import stride_of
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
    """Return the buffers with one size that is no multiple of the alignment, which rules out peak outward."""
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


def fits(buffers: Buffers, *capacities: int) -> bool:
    """Return whether the buffers fit, by trying every offset in every arena for every instance."""
    jobs = sorted(timed(buffers), key=lambda job: -job[3])  # fixed offsets first

    def place(k: int, placed: list[tuple[set[int], int, int, int]]) -> bool:
        if k == len(jobs):
            return True
        times, size, alignment, fixed = jobs[k]
        for arena, capacity in enumerate(capacities):
            low = fixed - arena * stride_of(capacities)
            for at in range(0, capacity - size + 1, alignment) if fixed < 0 else (low,):
                if not 0 <= at <= capacity - size or at % alignment:
                    continue
                if all(
                    arena != a or at >= h or at + size <= lo or not times & t for t, a, lo, h in placed
                ) and place(k + 1, [*placed, (times, arena, at, at + size)]):
                    return True
        return False

    return place(0, [])

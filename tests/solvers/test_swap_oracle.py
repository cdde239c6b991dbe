"""Distance of the planner from the least possible stall."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from offload_oracle import least_stall
from swap_steps import step_from

from solvers.swap import Link, LinkBound, OffloadPlanner, Step, replay

if TYPE_CHECKING:
    from collections.abc import Iterator


def training(random: np.random.Generator) -> Step:
    """Layers forward and backward; some outputs are read by the next layer, too."""
    layers = int(random.integers(4, 7))
    buffers = []
    for i in range(layers):
        again = [(i + 1, False)] if random.random() < 0.5 and i + 1 < layers else []
        accesses = {op: (op, writes) for op, writes in [(i, True), *again, (2 * layers - 1 - i, False)]}
        buffers.append((int(random.integers(1, 9)), [accesses[op] for op in sorted(accesses)]))
    return step_from(random.choice([0.5, 1.0, 1.5, 2.0], 2 * layers).tolist(), buffers)


def cases(seeds: range) -> Iterator[tuple[int, float, float]]:
    """Yield for each seed the stalls of the planner and of the oracle."""
    for seed in seeds:
        random = np.random.default_rng(seed)
        step = training(random)
        fixed, rate = [0.0, 0.125, 0.25], [0.125, 0.25, 0.5]
        link = Link(*(float(random.choice(values)) for values in (fixed, rate, fixed, rate)))
        planner = OffloadPlanner(step, link, least_bytes=0)
        floor = planner.floor()[0]
        limit = floor + int((step.peak_bytes - floor) * random.choice([0.2, 0.4, 0.6, 0.8]))
        proven = least_stall(step, link, limit)
        assert proven is not None
        schedule, stall = proven
        judged = replay(step, link, schedule)
        assert judged.peak_bytes <= limit
        held = planner.hold(limit)
        assert held.stall_seconds >= stall - 1e-9
        if seed % 4 == 0:
            assert LinkBound(step, link).stall_seconds(limit) <= stall + 1e-9
        yield seed, held.stall_seconds, stall


def test_planner_is_within_five_percent_of_the_oracle_on_few() -> None:
    """The seeds include those with the longest search."""
    for seeds in (range(3), range(187, 188), range(367, 368)):
        for seed, ours, least in cases(seeds):
            assert ours <= 1.05 * least + 1e-9, seed


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_planner_is_within_five_percent_of_the_oracle() -> None:
    for seed, ours, least in cases(range(400)):
        assert ours <= 1.05 * least + 1e-9, seed

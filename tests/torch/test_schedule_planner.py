"""Schedules whose arena, not only the load, is within the limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from swap_steps import step_from

from solvers.swap import PlannedSchedule, Step

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from mempool.torch.eager.patterns import OffloadSchedule
from mempool.torch.eager.recorded_iteration import RecordedIteration, RecordedStep
from mempool.torch.eager.schedule_planner import SchedulePlanner, arena_bytes
from mempool.torch.offload.host_placement import host_copies
from solvers.swap import Link, OffloadPlanner, replay

LAYERS, SHARE, ALIGNMENT = 24, 0.6, 512
#: Seeds of steps whose first schedule does not fit, although another with as many moves does.
SEEDS = (0, 1, 3)
LINK = Link(1e-5, 1e-10, 1e-5, 1e-10)
SLOW_LINK = Link(1e-5, 8e-9, 1e-5, 8e-9)


def training(seed: int, layers: int = LAYERS) -> Step:
    """Return a forward and backward pass of layers of all sizes, each with a short-lived temporary."""
    random, k = np.random.default_rng(seed), 2 * layers
    buffers = []
    for layer in range(layers):
        buffers.append((int(random.integers(64, 1024)) << 10, [(layer, True), (k - 1 - layer, False)]))
        for at in (layer, k - 1 - layer):
            end = min(at + int(random.integers(0, 3)), k - 1)
            ops = [(at, True)] + ([(end, False)] if end > at else [])
            buffers.append((int(random.integers(32, 512)) << 10, ops))
    return step_from([1e-3] * k, buffers, circular=True)


def planned(step: Step, link: Link = LINK) -> tuple[SchedulePlanner, int, PlannedSchedule]:
    """Return the planner, the limit and the schedule."""
    engine: Any = SimpleNamespace(link=lambda: link, waited=float, reserve=bool)
    planner, limit = SchedulePlanner(engine, None, ALIGNMENT), int(SHARE * step.peak_bytes)
    return planner, limit, planner.fit_arena(OffloadPlanner(step, link), step, limit)


def program_for(step: Step, swap: PlannedSchedule) -> OffloadSchedule:
    recording = RecordedIteration(functions=[None] * len(step))
    return OffloadSchedule(recording, RecordedStep(step, [], {}), swap, host_copies(step, swap.schedule))


@pytest.mark.parametrize("seed", SEEDS)
def test_better_packed_schedule_is_preferred_to_more_moves(seed: int) -> None:
    """Planned for the load alone, none of these steps fits the limit."""
    step = training(seed)
    _, limit, swap = planned(step)
    assert arena_bytes(step, swap.schedule, ALIGNMENT) <= limit
    assert arena_bytes(step, OffloadPlanner(step, LINK).nearest(limit).schedule, ALIGNMENT) > limit
    assert swap.limit_bytes == limit  # the limit of the schedule is not lowered
    assert swap.stall_seconds <= OffloadPlanner(step, LINK).nearest(limit).stall_seconds * (1 + 1e-9)


@pytest.mark.parametrize("seed", [0, 7])
def test_packable_schedule_waits_little_longer_than_the_best(seed: int) -> None:
    """The best schedules within the limit, or within slightly less, leave gaps beyond the limit."""
    step = training(seed)
    _, limit, swap = planned(step, SLOW_LINK)
    best = OffloadPlanner(step, SLOW_LINK).nearest(limit)
    assert arena_bytes(step, best.schedule, ALIGNMENT) > limit >= arena_bytes(step, swap.schedule, ALIGNMENT)
    assert swap.stall_seconds <= 1.03 * best.stall_seconds


@pytest.mark.parametrize("seed", SEEDS)
def test_earlier_reloads_need_a_packable_arena(seed: int) -> None:
    step = training(seed)
    planner, limit, swap = planned(step)
    program = program_for(step, swap)
    made = [
        planner.start_reloads_earlier(program, [(row, seconds) for row in range(len(swap.schedule))], limit)
        for seconds in (1e-3, 5e-3, 2e-2)
    ]
    assert any(made)
    for better in (one.swap.schedule for one in made if one is not None):
        assert (better.fetch <= swap.schedule.fetch).all()
        assert arena_bytes(step, better, ALIGNMENT) <= limit


def test_planned_waits_start_no_reload_earlier() -> None:
    step = training(SEEDS[0])
    planner, limit, swap = planned(step, SLOW_LINK)
    schedule, wait = swap.schedule, swap.replayed.wait
    assert wait.sum() > 0
    waited = [(row, wait[schedule.use[row] % len(step)]) for row in range(len(schedule))]
    first = {schedule.use[row] % len(step): (row, seconds) for row, seconds in waited}
    assert planner.start_reloads_earlier(program_for(step, swap), [*first.values()], limit) is None


def test_shorter_durations_correct_the_prediction_and_the_moves() -> None:
    step = training(SEEDS[1])
    longer = step.seconds.copy()
    longer[[LAYERS - 1, LAYERS + 1]] += 0.02  # a schedule would rely on that time
    planner, limit, swap = planned(step.with_seconds(longer), SLOW_LINK)
    program = program_for(step.with_seconds(longer), swap)
    made = planner.retime(program, step.seconds.tolist(), limit)
    assert (program.recorded.step.seconds == step.seconds).all()
    assert program.swap.replayed.iteration_seconds == replay(step, SLOW_LINK, swap.schedule).iteration_seconds
    assert made is not None
    assert made.swap.stall_seconds < program.swap.stall_seconds
    assert planner.retime(made, longer.tolist(), limit) is None
    assert (made.recorded.step.seconds == step.seconds).all()

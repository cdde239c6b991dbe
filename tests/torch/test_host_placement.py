"""Copies on the host lie at their planned offsets until their last read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swap_steps import links, steps

from solvers.swap import PlannedSchedule, Step

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from mempool._core import FreeList
from mempool.torch.eager.patterns import RELOAD, schedule_of
from mempool.torch.eager.recorded_iteration import RecordedIteration, RecordedStep
from mempool.torch.offload.host_memory import pages
from mempool.torch.offload.host_placement import host_copies, packed
from solvers.swap import OffloadPlanner
from traces.buffers import Buffers

TURNS = 4


def check_copies(step: Step, swap: PlannedSchedule) -> None:
    """Simulate the copies of a schedule for some turns in a host arena of the planned size."""
    copies = host_copies(step, swap.schedule)
    program = schedule_of(
        RecordedIteration(functions=[None] * len(step)), RecordedStep(step, [], {}), swap, copies
    )
    free_list, there = FreeList(copies.size), dict[int, int]()
    rests = {int(row) for row in swap.schedule.resting}
    for turn in range(TURNS):
        for line_at, line in enumerate(program.actions):
            for action, row in line.before:
                if action == RELOAD and turn >= 2:
                    assert row in there, f"the copy of {row} is gone at {line_at}"
            for row in line.dropped_copies:
                if row in there:
                    free_list.release(there.pop(row), int(step.size[row]))
            for row, at in line.after:
                if row not in there:
                    assert free_list.allocate_at(at, int(step.size[row]))
                    there[row] = at
    always = {int(row) for row in swap.schedule.buffer} & there.keys()
    assert not rests & there.keys()
    assert sum(pages(int(step.size[row])) for row in always) <= copies.size


@settings(max_examples=50)
@given(st.data())
def test_planned_offset_is_free_and_the_copy_lasts_until_its_last_read(data: st.DataObject) -> None:
    step = data.draw(steps(circles=True).filter(lambda step: step.circular))
    planner = OffloadPlanner(step, data.draw(links()), least_bytes=0, tries=1)
    low = planner.floor()[0]
    check_copies(step, planner.hold(low + (step.peak_bytes - low) * data.draw(st.integers(0, 3)) // 4))


def test_copies_share_no_memory_in_any_turn() -> None:
    """The smallest arena would need places that alternate between turns."""
    lives = [(9, 16), (1, 16), (10, 20), (12, 26), (13, 29), (14, 32), (16, 38), (16, 39), (16, 42), (16, 46)]
    start, end = zip(*lives, strict=True)
    at, _ = packed(Buffers.of(start, end, 4096, alignment=4096, period=34))
    taken = {(place, time % 34) for place, life in zip(at, lives, strict=True) for time in range(*life)}
    assert len(taken) == sum(end) - sum(start)

"""Recording schedule: conditions that end a pause without recording."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from mempool.planning.backoff import (
    AllocationCounts,
    RecordingSchedule,
)
from mempool.planning.options import OPTIONS


def over(
    schedule: RecordingSchedule, allocations: int, misses: int, *, replaying: bool = True, miss_score: int = 0
) -> bool:
    return schedule.is_over(AllocationCounts(allocations, misses), replaying=replaying, miss_score=miss_score)


def test_pause_length_follows_from_the_vain_recording_alone() -> None:
    """A burst without repetition, after days of training, does not cause a pause of days."""
    schedule = RecordingSchedule()
    days = 1 << 40
    pauses = []
    for _ in range(12):
        schedule.recording_began(AllocationCounts(days, days))
        schedule.pause_fruitless(AllocationCounts(days + 100_000, days + 100_000), replaying=True)
        until = schedule.wake_conditions(
            AllocationCounts(days + 100_000, days + 100_000), replaying=True
        ).allocations
        pauses.append(until - days - 100_000)
    assert pauses[:4] == [400_000, 800_000, 1_600_000, 3_200_000]
    assert set(pauses[4:]) == {OPTIONS.max_pause}
    schedule.plan_installed(AllocationCounts(days, days), anew=True)
    schedule.pause_fruitless(AllocationCounts(days + 100_000, days + 100_000), replaying=True)
    assert over(schedule, days + 500_000, days)


COUNT = st.integers(0, 1 << 20)
#: Calls of a schedule, by name, with the counters and the last argument.
CALLS: dict[str, Callable[[RecordingSchedule, AllocationCounts, bool], None]] = {
    "began": lambda schedule, now, _: schedule.recording_began(now),
    "installed": lambda schedule, now, anew: schedule.plan_installed(now, anew=anew),
    "settled": lambda schedule, now, improvable: schedule.pause_settled(now, improvable=improvable),
    "fruitless": lambda schedule, now, replaying: schedule.pause_fruitless(now, replaying=replaying),
    "failed": lambda schedule, now, _: schedule.pause_failed(now),
    "dropped": lambda schedule, now, recording: schedule.plans_dropped(now, recording=recording),
}


@given(
    calls=st.lists(st.tuples(st.sampled_from(sorted(CALLS)), COUNT, COUNT, st.booleans()), max_size=12),
    passed=COUNT,
    missed=COUNT,
    replaying=st.booleans(),
    score=st.integers(0, 2 * OPTIONS.changed_score),
)
def test_planner_wakes_exactly_where_a_pause_is_over(
    calls: list[tuple[str, int, int, bool]], passed: int, missed: int, replaying: bool, score: int
) -> None:
    """The wake conditions of any history hold if and only if the schedule's pause is over."""
    schedule, now = RecordingSchedule(), AllocationCounts(0, 0)
    for name, more, misses, last in calls:
        now = AllocationCounts(now.allocations + more, now.misses + min(misses, more))
        CALLS[name](schedule, now, last)
    now = AllocationCounts(now.allocations + passed, now.misses + min(missed, passed))
    wake = schedule.wake_conditions(now, replaying=replaying)
    reached = now.allocations >= wake.allocations or now.misses >= wake.misses or score >= wake.miss_score
    assert reached == schedule.is_over(now, replaying=replaying, miss_score=score)

"""Recording schedule: conditions that end a pause without recording."""

from __future__ import annotations

from mempool.planning.backoff import (
    NEVER,
    AllocationCounts,
    RecordingSchedule,
    WakeConditions,
)
from mempool.planning.options import OPTIONS


def over(
    schedule: RecordingSchedule, allocations: int, misses: int, *, replaying: bool = True, miss_score: int = 0
) -> bool:
    return schedule.is_over(AllocationCounts(allocations, misses), replaying=replaying, miss_score=miss_score)


def test_pause_without_a_former_recording_never_ends() -> None:
    schedule = RecordingSchedule()
    assert not over(schedule, 1 << 40, 1 << 39, replaying=False)
    never = WakeConditions(NEVER, NEVER, NEVER)
    assert schedule.wake_conditions(AllocationCounts(5, 5), replaying=False) == never


def test_a_miss_in_a_thousand_after_a_settled_plan_is_no_change() -> None:
    schedule = RecordingSchedule()
    schedule.pause_settled(AllocationCounts(10_000, 50))
    assert not over(schedule, 20_000, 60)
    assert over(schedule, 20_000, 61)
    assert schedule.wake_conditions(AllocationCounts(20_000, 60), replaying=True) == WakeConditions(
        NEVER, 61, OPTIONS.changed_score
    )
    assert over(schedule, 20_000, 50, miss_score=OPTIONS.changed_score)


def test_former_miss_rate_may_continue_during_a_pause_that_ends_in_time() -> None:
    """A small loop may happen to follow part of the plan, after a program with the same miss rate."""
    schedule = RecordingSchedule()
    schedule.recording_began(AllocationCounts(1_000, 100))
    schedule.pause_fruitless(AllocationCounts(11_000, 300), replaying=True)  # one in fifty
    assert not over(schedule, 21_000, 500)
    assert over(schedule, 21_000, 701)
    assert not over(schedule, 21_000, 500, miss_score=24)
    assert schedule.wake_conditions(AllocationCounts(21_000, 500), replaying=True).misses == 701
    assert not over(schedule, 50_999, 300 + 700)
    assert over(schedule, 51_000, 300 + 700)


def test_useless_plan_is_left_alone_for_long() -> None:
    for misses, replaying in [(9_000, True), (0, False)]:
        schedule = RecordingSchedule()
        schedule.recording_began(AllocationCounts(0, 0))
        schedule.pause_fruitless(AllocationCounts(10_000, misses), replaying=replaying)
        assert not over(schedule, 49_999, 49_999, miss_score=OPTIONS.changed_score)
        assert over(schedule, 50_000, 9_000)
        assert schedule.wake_conditions(AllocationCounts(10_001, 0), replaying=True) == WakeConditions(
            50_000, NEVER, NEVER
        )


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


def test_improvable_plan_is_recorded_again_ever_more_rarely() -> None:
    schedule = RecordingSchedule()
    schedule.recording_began(AllocationCounts(0, 0))
    for since, until in [(1_000, 5_000), (6_000, 14_000)]:
        schedule.pause_settled(AllocationCounts(since, 0), improvable=True)
        assert not over(schedule, until - 1, 0)
        assert over(schedule, until, 0)
        schedule.recording_began(AllocationCounts(until, 0))
    schedule.pause_settled(AllocationCounts(15_000, 0))
    assert not over(schedule, 1 << 50, 0)


def test_pause_is_short_after_a_failure_or_a_new_plan_and_none_without_an_arena() -> None:
    schedule = RecordingSchedule()
    schedule.pause_failed(AllocationCounts(0, 0))
    assert not over(schedule, 0, 0)
    assert over(schedule, 256, 1)
    schedule.recording_began(AllocationCounts(1_000_001, 1_000_001))
    schedule.pause_settled(AllocationCounts(1_100_000, 1_000_001))
    assert over(schedule, 1_101_000, 1_001_000)
    assert over(schedule, 1_100_000, 1_000_001, replaying=False)


def test_plans_dropped_in_a_pause_do_not_prolong_the_pause() -> None:
    """The recording in vain and the plan without hits were one failure."""
    schedule = RecordingSchedule()
    schedule.recording_began(AllocationCounts(0, 0))
    schedule.pause_fruitless(AllocationCounts(1000, 100), replaying=True)
    until = schedule.wake_conditions(AllocationCounts(1000, 100), replaying=False)
    assert until.allocations == 0  # no plan is in effect any more
    schedule.plans_dropped(AllocationCounts(1100, 100), recording=False)
    assert schedule.wake_conditions(AllocationCounts(1100, 100), replaying=False).allocations == 5000
    assert not over(schedule, 4999, 4000, replaying=False, miss_score=OPTIONS.changed_score)
    schedule.recording_began(AllocationCounts(5000, 4000))
    schedule.plans_dropped(AllocationCounts(6000, 4000), recording=True)
    assert schedule.wake_conditions(AllocationCounts(6000, 4000), replaying=False).allocations == 14_000

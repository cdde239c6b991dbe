"""Recording schedule: conditions that end a pause without recording."""

from __future__ import annotations

from mempool.planning.backoff import LONGEST_PAUSE, NEVER, SPOILT, Counts, Due, Rest


def over(rest: Rest, allocations: int, misses: int, *, replaying: bool = True, spoilt: int = 0) -> bool:
    return rest.is_over(Counts(allocations, misses), replaying=replaying, spoilt=spoilt)


def test_pause_without_a_former_recording_never_ends() -> None:
    assert not over(Rest(), 1 << 40, 1 << 39, replaying=False)
    assert Rest().due(Counts(5, 5), replaying=False) == Due(NEVER, NEVER, NEVER)


def test_a_miss_in_a_thousand_after_a_settled_plan_is_no_change() -> None:
    rest = Rest()
    rest.since_settled(Counts(10_000, 50))
    assert not over(rest, 20_000, 60)
    assert over(rest, 20_000, 61)
    assert rest.due(Counts(20_000, 60), replaying=True) == Due(NEVER, 61, SPOILT)
    assert over(rest, 20_000, 50, spoilt=SPOILT)


def test_former_miss_rate_may_continue_during_a_pause() -> None:
    rest = Rest()
    rest.recorded_from(Counts(1_000, 100))
    rest.since_vain(Counts(11_000, 300), replaying=True)  # one in fifty
    assert not over(rest, 21_000, 500)
    assert over(rest, 21_000, 701)
    assert not over(rest, 21_000, 500, spoilt=24)
    asked = rest.due(Counts(21_000, 500), replaying=True).misses
    assert asked == 701
    assert rest.due(Counts(61_000, 1_300), replaying=True).misses > 1_300 + 0.9 * 1_000  # ever more rarely


def test_pause_ends_in_time_even_at_the_former_miss_rate() -> None:
    """A small loop may happen to follow part of the plan, after a program with the same miss rate."""
    rest = Rest()
    rest.recorded_from(Counts(1_000, 100))
    rest.since_vain(Counts(11_000, 300), replaying=True)
    assert not over(rest, 50_999, 300 + 700)
    assert over(rest, 51_000, 300 + 700)
    assert rest.due(Counts(12_000, 301), replaying=True).allocations == 51_000


def test_useless_plan_is_left_alone_for_long() -> None:
    for misses, replaying in [(9_000, True), (0, False)]:
        rest = Rest()
        rest.recorded_from(Counts(0, 0))
        rest.since_vain(Counts(10_000, misses), replaying=replaying)
        assert not over(rest, 49_999, 49_999, spoilt=SPOILT)
        assert over(rest, 50_000, 9_000)
        assert rest.due(Counts(10_001, 0), replaying=True) == Due(50_000, NEVER, NEVER)


def test_pause_length_follows_from_the_vain_recording_alone() -> None:
    """A burst without repetition, after days of training, does not cause a pause of days."""
    rest = Rest()
    days = 1 << 40
    pauses = []
    for _ in range(12):
        rest.recorded_from(Counts(days, days))
        rest.since_vain(Counts(days + 100_000, days + 100_000), replaying=True)
        until = rest.due(Counts(days + 100_000, days + 100_000), replaying=True).allocations
        pauses.append(until - days - 100_000)
    assert pauses[:4] == [400_000, 800_000, 1_600_000, 3_200_000]
    assert set(pauses[4:]) == {LONGEST_PAUSE}
    rest.planned(Counts(days, days), anew=True)
    rest.since_vain(Counts(days + 100_000, days + 100_000), replaying=True)
    assert over(rest, days + 500_000, days)


def test_improvable_plan_is_recorded_again_ever_more_rarely() -> None:
    rest = Rest()
    rest.recorded_from(Counts(0, 0))
    for since, until in [(1_000, 5_000), (6_000, 14_000)]:
        rest.since_settled(Counts(since, 0), improvable=True)
        assert not over(rest, until - 1, 0)
        assert over(rest, until, 0)
        rest.recorded_from(Counts(until, 0))
    rest.since_settled(Counts(15_000, 0))
    assert not over(rest, 1 << 50, 0)


def test_new_plan_resets_the_length_of_the_pause() -> None:
    rest = Rest()
    rest.since_failure(Counts(1_000_000, 1_000_000))
    rest.recorded_from(Counts(1_000_001, 1_000_001))
    rest.since_settled(Counts(1_100_000, 1_000_001))
    assert over(rest, 1_101_000, 1_001_000)


def test_pause_without_an_arena_ends_at_once() -> None:
    rest = Rest()
    rest.since_settled(Counts(1_000, 0))
    assert over(rest, 1_000, 0, replaying=False)


def test_pause_after_a_failure_without_events_is_short() -> None:
    rest = Rest()
    rest.since_failure(Counts(0, 0))
    assert not over(rest, 0, 0)
    assert over(rest, 256, 1)


def test_plans_dropped_in_a_pause_do_not_prolong_the_pause() -> None:
    """The recording in vain and the plan without hits were one failure."""
    rest = Rest()
    rest.recorded_from(Counts(0, 0))
    rest.since_vain(Counts(1000, 100), replaying=True)
    until = rest.due(Counts(1000, 100), replaying=False)
    assert until.allocations == 0  # no plan is in effect any more
    rest.since_deserted(Counts(1100, 100), recording=False)
    assert rest.due(Counts(1100, 100), replaying=False) == Due(5000, NEVER, NEVER)
    assert not rest.is_over(Counts(4999, 4000), replaying=False, spoilt=SPOILT)
    rest.recorded_from(Counts(5000, 4000))
    rest.since_deserted(Counts(6000, 4000), recording=True)
    assert rest.due(Counts(6000, 4000), replaying=False) == Due(14_000, NEVER, NEVER)

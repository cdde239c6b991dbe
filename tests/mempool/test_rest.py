"""What ends the time without recording."""

from __future__ import annotations

from mempool.rest import NEVER, SPOILT, Counts, Due, Rest


def over(rest: Rest, allocations: int, misses: int, *, replaying: bool = True, spoilt: int = 0) -> bool:
    return rest.is_over(Counts(allocations, misses), replaying=replaying, spoilt=spoilt)


def test_nothing_ends_it_where_recording_never_began() -> None:
    assert not over(Rest(), 1 << 40, 1 << 39, replaying=False)
    assert Rest().due(Counts(5, 5), replaying=False) == Due(NEVER, NEVER, NEVER)


def test_after_a_settled_plan_one_miss_in_a_thousand_is_no_change() -> None:
    rest = Rest()
    rest.since_settled(Counts(10_000, 50))
    assert not over(rest, 20_000, 60)
    assert over(rest, 20_000, 61)
    assert rest.due(Counts(20_000, 60), replaying=True) == Due(NEVER, 61, SPOILT)
    assert over(rest, 20_000, 50, spoilt=SPOILT)


def test_what_always_went_off_the_plan_may_go_on_to() -> None:
    rest = Rest()
    rest.recorded_from(Counts(1_000, 100))
    rest.since_vain(Counts(11_000, 300), replaying=True)  # one in fifty
    assert not over(rest, 21_000, 500)
    assert over(rest, 21_000, 701)
    assert not over(rest, 21_000, 500, spoilt=24)
    asked = rest.due(Counts(21_000, 500), replaying=True).misses
    assert asked == 701
    assert rest.due(Counts(61_000, 1_300), replaying=True).misses > 1_300 + 0.9 * 1_000  # ever more rarely


def test_what_nothing_follows_is_left_alone_for_long() -> None:
    for misses, replaying in [(9_000, True), (0, False)]:
        rest = Rest()
        rest.recorded_from(Counts(0, 0))
        rest.since_vain(Counts(10_000, misses), replaying=replaying)
        assert not over(rest, 39_999, 39_999, spoilt=SPOILT)
        assert over(rest, 40_000, 9_000)
        assert rest.due(Counts(10_001, 0), replaying=True) == Due(40_000, NEVER, NEVER)


def test_a_new_plan_forgets_how_long_the_last_pause_was_to_be() -> None:
    rest = Rest()
    rest.for_long(Counts(1_000_000, 1_000_000))
    rest.recorded_from(Counts(1_000_001, 1_000_001))
    rest.since_settled(Counts(1_100_000, 1_000_001))
    assert over(rest, 1_101_000, 1_001_000)


def test_without_an_arena_it_ends_at_once() -> None:
    rest = Rest()
    rest.since_settled(Counts(1_000, 0))
    assert over(rest, 1_000, 0, replaying=False)


def test_a_pause_of_nothing_ends_with_the_next_allocation() -> None:
    rest = Rest()
    rest.for_long(Counts(0, 0))
    assert not over(rest, 0, 0)
    assert over(rest, 1, 1)

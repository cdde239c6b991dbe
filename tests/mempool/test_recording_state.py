"""State machine of recording: its transitions, and the conditions that end a pause."""

from __future__ import annotations

import pytest
from cores import Core

from mempool import _core

Schedule = _core.RecordingSchedule
#: Events that lead from idle to each state.
PATHS = {"idle": [], "recording": ["begin"], "backed_off": ["begin", "failed"]}
PAUSES = ("settled", "improvable", "fruitless", "failed")


def next_state(state: str, event: str) -> str:
    """Return the state after an event, according to the documented rules."""
    if event == "end" or (state == "idle" and event != "begin"):
        return "idle"
    if event in ("begin", "resume"):
        return "recording"
    return "backed_off" if event in PAUSES else state


@pytest.mark.parametrize(("state", "event", "after"), Schedule.transitions())
def test_each_transition_follows_the_rules_and_is_logged(state: str, event: str, after: str) -> None:
    assert after == next_state(state, event)
    schedule, core = Schedule(), Core()
    for step in PATHS[state]:
        schedule.apply(step, 0, 0)
        core.client.advance_recording(step)
    assert schedule.state == core.client.state()["recording_state"] == state
    logged = len(core.client.decisions())
    assert schedule.apply(event, 0, 0) == (after != state)
    core.client.advance_recording(event)
    assert schedule.state == core.client.state()["recording_state"] == after
    assert core.client.state()["recording"] == (after == "recording")
    name = {"recording": "recording", "backed_off": "paused", "idle": "stopped"}[after]
    new = [(entry["decision"], entry["reason"]) for entry in core.client.decisions()[logged:]]
    assert new == ([] if after == state else [(name, event if name == "paused" else "")])


def test_pause_length_follows_from_the_vain_recording_alone() -> None:
    """A burst without repetition, after days of training, does not cause a pause of days."""
    schedule, days, burst = Schedule(), 1 << 40, 100_000

    def pause() -> int:
        """Record in vain; return the length of the pause in allocations."""
        schedule.apply("begin", days, days)
        schedule.apply("fruitless", days + burst, days + burst, replaying=True)
        low, high = 0, 2 * _core.MAX_PAUSE
        while low < high:
            middle = (low + high) // 2
            due = schedule.is_due(days + burst + middle, days + burst, replaying=True)
            low, high = (low, middle) if due else (middle + 1, high)
        return low

    pauses = [pause() for _ in range(12)]
    assert pauses[:4] == [400_000, 800_000, 1_600_000, 3_200_000]
    assert set(pauses[4:]) == {_core.MAX_PAUSE}
    schedule.apply("planned", days, days)
    assert pause() == 400_000


def test_pause_ends_by_misses_where_a_plan_is_followed_and_without_a_plan_at_once() -> None:
    schedule = Schedule()
    schedule.apply("begin", 0, 0)
    schedule.apply("settled", 10_000, 100)
    for allocations, misses in ((1 << 50, 100), (20_000, 110)):
        assert not schedule.is_due(allocations, misses, replaying=True, miss_score=_core.CHANGED_SCORE - 1)
    assert schedule.is_due(20_000, 111, replaying=True)
    assert schedule.is_due(10_000, 100, replaying=True, miss_score=_core.CHANGED_SCORE)
    assert schedule.is_due(10_000, 100, replaying=False)
    schedule.apply("resume", 20_000, 111)
    schedule.apply("fruitless", 30_000, 1_111, replaying=True)  # one miss in ten belongs to the program
    assert not schedule.is_due(40_000, 3_000, replaying=True)
    assert schedule.is_due(40_000, 3_200, replaying=True)


def test_dropped_plans_prolong_a_finished_pause_only() -> None:
    schedule = Schedule()
    schedule.apply("begin", 0, 0)
    schedule.apply("failed", 1_000, 0)
    schedule.apply("dropped", 2_000, 0)
    assert schedule.is_due(5_000, 0)
    schedule.apply("dropped", 6_000, 0)
    assert not schedule.is_due(7_000, 0)


def test_recording_that_ended_is_not_resumed() -> None:
    core = Core()
    core.client.advance_recording("begin")
    core.client.advance_recording("failed")
    core.run([4096] * 1024)
    core.client.set_recording(False)
    assert not core.client.resume_recording()
    core.client.advance_recording("begin")
    core.client.advance_recording("failed")
    assert not core.client.resume_recording()
    core.run([4096] * 8 * 1024)
    assert core.client.resume_recording()
    with pytest.raises(ValueError, match="no event of this name"):
        core.client.advance_recording("unknown")

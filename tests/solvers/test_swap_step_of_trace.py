"""Steps of traces, transfer times, and the replay of schedules."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from swap_steps import links, one_move, schedules, slow_loads, slow_stall, step_from, steps

from solvers import PlanError, Stop, solve
from solvers.swap import (
    PRESETS,
    Link,
    OffloadPlanner,
    Schedule,
    Step,
    parse_link,
    reduce_fragmentation,
    replay,
    step_of,
)
from solvers.swap.absences import absences_of
from solvers.swap.placement import device_buffers
from solvers.swap.step_of_trace import iteration_of
from solvers.swap.transfer_times import advance_reloads, delay_offloads, tighten
from traces import EventType, Trace


class Program:
    """A program of iterations whose operations each read earlier buffers and make a buffer."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.count = self.now = 0

    def row(self, kind: EventType, buffer: int, size: int = 0, name: int = -1) -> None:
        self.rows.append((kind, buffer, size, self.now, name))

    def alloc(self, size: int, name: int = -1) -> int:
        self.row(EventType.ALLOC, self.count, size, name)
        self.count += 1
        return self.count - 1

    def operation(self, name: int, size: int, reads: list[int]) -> int:
        made = self.alloc(size, name)
        for buffer in reads:
            self.row(EventType.READ, buffer, 0, name)
        self.row(EventType.WRITE, made, 0, name)
        self.now += 10
        return made

    def trace(self, **metadata: str) -> Trace:
        kind, buffer, size, time, name = zip(*self.rows, strict=True)
        names = ("a", "b", "c", "step")
        return Trace.of(kind, buffer, size, time_ns=time, operation=name, names=names, metadata=metadata)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Trace, int]:
    """Programs of equal iterations; buffers live for a few operations, even into the next iteration."""
    program, k = Program(), draw(st.integers(1, 6))
    weights = [program.alloc(draw(st.integers(1, 9))) for _ in range(draw(st.integers(0, 3)))]
    plan = [
        (draw(st.integers(0, 2)), draw(st.integers(1, 9)), draw(st.integers(1, k)), draw(st.booleans()))
        for _ in range(k)
    ]
    alive: list[tuple[int, int]] = []  # buffer, operations left
    for _ in range(6):
        program.row(EventType.MARK, -1, 0, 3)
        for name, size, life, reads in plan:
            read = [b for b, _ in alive if reads] + weights
            made = program.operation(name, size, read)
            alive = [(b, left - 1) for b, left in [*alive, (made, life)]]
            for buffer in [b for b, left in alive if left <= 0]:
                program.row(EventType.FREE, buffer)
            alive = [one for one in alive if one[1] > 0]
    program.row(EventType.MARK, -1, 0, 3)
    return program.trace(time="operation"), k


@given(programs(), st.booleans())
def test_iteration_is_a_circle_with_the_load_of_the_steady_state_and_a_whole_trace_a_line(
    made: tuple[Trace, int], whole: bool
) -> None:
    trace, k = made
    step = step_of(trace, whole=whole)
    first, end = (0, len(trace)) if whole else iteration_of(trace) or (0, 0)
    assert step.circular == (not whole)
    assert len(step) == (6 * k if whole else k)
    assert step.peak_bytes == trace.load()[first:end].max()
    assert whole or step.duration == pytest.approx(k * 1e-8)
    touched = ((trace.kind == EventType.READ) | (trace.kind == EventType.WRITE))[first:end].sum()
    assert len(step.access_op) == touched
    absences_of(step)


@given(programs())
def test_times_of_events_split_no_operation(made: tuple[Trace, int]) -> None:
    trace, k = made
    apart = dataclasses.replace(trace, time_ns=np.arange(len(trace)), metadata={})
    step = step_of(apart)
    assert len(step) == k  # each operation allocates first
    assert step.peak_bytes == step_of(trace).peak_bytes


def test_equal_neighbouring_operations_without_allocations_are_merged() -> None:
    program = Program()
    made = program.operation(0, 4, [])
    for _ in range(3):
        program.row(EventType.WRITE, made, 0, 1)
        program.now += 10
    program.row(EventType.READ, made, 0, 2)
    program.now += 10
    program.row(EventType.FREE, made)
    assert len(step_of(program.trace())) == 3
    assert len(step_of(program.trace(time="operation"))) == 5


def test_sizes_are_rounded_to_the_allocators_alignment() -> None:
    program = Program()
    program.operation(0, 5, [])
    program.operation(1, 5, [])
    assert step_of(program.trace(alignment="512")).peak_bytes == 1024


def test_trace_without_accesses_or_time_is_refused() -> None:
    silent = Trace.of([EventType.ALLOC, EventType.FREE], [0, 0], [4, 0])
    with pytest.raises(PlanError, match="no reads and writes"):
        step_of(silent)
    program = Program()
    program.row(EventType.READ, program.alloc(4), 0, 0)
    with pytest.raises(PlanError, match="no time passes"):
        step_of(program.trace())


def test_times_without_a_device_clock_are_replaced_by_a_bandwidth() -> None:
    program = Program()
    made = program.operation(0, 100, [])
    program.operation(1, 300, [made])
    trace = program.trace()
    assert step_of(trace).duration > 0
    trace = dataclasses.replace(trace, metadata={**trace.metadata, "clock": "none"})
    with pytest.raises(PlanError, match="bandwidth"):
        step_of(trace)
    assert step_of(trace, bandwidth=100.0).duration > 0


SOME = settings(max_examples=15)


def arena_of(step: Step, schedule: Schedule) -> int:
    return solve(device_buffers(step, schedule)[0], stop=Stop(nodes=20_000)).arena_bytes


@given(st.data())
@settings(max_examples=60)
def test_tightened_moves_are_away_for_longer_and_otherwise_equal(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    schedule = data.draw(schedules(step))
    wait = replay(step, link, schedule).wait
    made = tighten(step, link, schedule, wait)
    replay(step, link, made)  # is possible
    assert (made.release <= schedule.release).all()
    assert (made.fetch >= schedule.fetch).all()
    for name in ("buffer", "last", "out", "use", "copied"):
        assert getattr(made, name).tolist() == getattr(schedule, name).tolist()


@given(st.data())
@SOME
def test_packed_schedule_stalls_no_longer_holds_the_limit_and_needs_no_larger_arena(
    data: st.DataObject,
) -> None:
    step, link = data.draw(steps()), data.draw(links())
    planner = OffloadPlanner(step, link, least_bytes=0, tries=2)
    swap = planner.hold((planner.floor()[0] + step.peak_bytes) // 2)
    made = reduce_fragmentation(planner, swap, lambda schedule: arena_of(step, schedule), variations=2)
    again = replay(step, link, made.schedule)
    assert again.stall_seconds == made.stall_seconds <= swap.stall_seconds * (1 + 1e-9)
    assert again.peak_bytes == made.peak_bytes <= swap.limit_bytes
    assert arena_of(step, made.schedule) <= arena_of(step, swap.schedule)


def test_tightened_buffer_is_on_the_device_no_longer_than_its_copies_need() -> None:
    """Operations and copies take a second; a quarter of a second is the margin."""
    step = step_from([1.0] * 16, [(4, [(0, True), (12, False)])])
    link = Link(0.0, 0.25, 0.0, 0.25)
    for margin, gone, back in ((1.0, 3, 10), (0.99, 2, 11), (9.0, 6, 7)):
        made = tighten(step, link, one_move((0, 0, 0, 6, 7, 12)), np.zeros(16), margin=margin)
        assert (made.release.tolist(), made.fetch.tolist()) == ([gone], [back])


@given(st.data())
@settings(max_examples=30)
def test_later_copy_out_changes_no_load_and_takes_no_more_host_memory(
    data: st.DataObject,
) -> None:
    step, link = data.draw(steps()), data.draw(links())
    schedule = data.draw(schedules(step))
    before = replay(step, link, schedule)
    later = delay_offloads(step, link, schedule, before.wait)
    after = replay(step, link, later)
    assert after.load.tolist() == before.load.tolist()
    at_once = Schedule(**{**vars(schedule), "out": schedule.last})
    made = delay_offloads(step, link, at_once, replay(step, link, at_once).wait)
    assert (replay(step, link, made).host_load <= replay(step, link, at_once).host_load).all()


@given(st.data(), st.integers(0, 2**32))
@settings(max_examples=30)
def test_earlier_copy_back_stays_within_the_limit(data: st.DataObject, seed: int) -> None:
    step, link = data.draw(steps()), data.draw(links())
    schedule = data.draw(schedules(step))
    before = replay(step, link, schedule)
    limit = data.draw(st.integers(0, step.peak_bytes))
    waited = np.random.default_rng(seed).random(len(schedule)) * 3
    sooner = advance_reloads(step, schedule, waited, limit)
    after = replay(step, link, sooner)
    assert (after.load <= np.maximum(before.load, limit)).all()
    assert (sooner.fetch <= schedule.fetch).all()
    assert (sooner.fetch[waited == 0] == schedule.fetch[waited == 0]).all()


FREE = Link(0.0, 0.0, 0.0, 0.0)


@given(st.data())
def test_loads_equal_a_count_of_instances(data: st.DataObject) -> None:
    step = data.draw(steps())
    schedule = data.draw(schedules(step))
    assert replay(step, FREE, schedule).load.tolist() == slow_loads(step, schedule)
    assert step.load.tolist() == slow_loads(step, Schedule.empty())


@given(st.data())
@settings(max_examples=50)
def test_stall_equals_copies_made_in_sequence(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    schedule = data.draw(schedules(step))
    found = replay(step, link, schedule)
    turns = 200 if step.circular else 1
    assert found.stall_seconds == pytest.approx(slow_stall(step, link, schedule, turns), rel=0.02, abs=1e-9)
    assert found.iteration_seconds == pytest.approx(step.duration + found.stall_seconds)
    if not step.circular:
        assert found.wait.sum() == pytest.approx(found.stall_seconds)


@given(st.data())
def test_free_link_never_stalls_and_a_slower_link_never_stalls_less(data: st.DataObject) -> None:
    step, link = data.draw(steps(circles=False)), data.draw(links())
    schedule = data.draw(schedules(step))
    assert replay(step, FREE, schedule).stall_seconds == 0
    slower = dataclasses.replace(link, out_per_byte=2 * link.out_per_byte, in_fixed=link.in_fixed + 1)
    assert replay(step, slower, schedule).stall_seconds >= replay(step, link, schedule).stall_seconds - 1e-12


def chain() -> Step:
    """Buffer 0 is written at 0, read at 4 and 8; buffer 1 is in use all the time."""
    accesses = [(op, True) for op in range(10)]
    return step_from([1.0] * 10, [(4, [(0, True), (4, False), (8, False)]), (1, accesses)])


def move(**changes: int | bool) -> Schedule:
    row = {"buffer": 0, "last": 0, "out": 0, "release": 2, "fetch": 3, "use": 4, "copied": True} | changes
    return Schedule(*(np.array([value]) for value in row.values()))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"buffer": 7}, "no buffer"),
        ({"last": -1}, "outside of the step"),
        ({"last": 1, "out": 1}, "not an access and the next"),
        ({"use": 8, "fetch": 7, "release": 6}, "not an access and the next"),
        ({"last": 4, "out": 3, "release": 5, "fetch": 6, "use": 8}, "copied before its last use"),
        ({"release": 0}, "given back before its copy"),
        ({"fetch": 2}, "back before it is away"),
        ({"fetch": 5}, "used before it is back"),
        ({"last": 8, "out": 8, "release": 9, "fetch": 10, "use": 14}, "after the step"),
        ({"copied": False}, "no copy of|has no copy"),
    ],
)
def test_impossible_move_is_refused(changes: dict[str, int], what: str) -> None:
    replay(chain(), FREE, move())
    with pytest.raises(PlanError, match=what):
        replay(chain(), FREE, move(**changes))


def test_duplicate_move_is_refused() -> None:
    twice = Schedule(*(np.repeat(getattr(move(), f.name), 2) for f in dataclasses.fields(Schedule)))
    with pytest.raises(PlanError, match="twice"):
        replay(chain(), FREE, twice)


def good_copies(step: Step, schedule: Schedule) -> list[bool]:
    """Return for each move whether the host has a copy at the begin, by walking back over the accesses."""
    k, good = len(step), []
    ended = {(int(b), int(use) % k) for b, use in zip(schedule.buffer, schedule.use, strict=True)}
    for buffer, last in zip(schedule.buffer.tolist(), schedule.last.tolist(), strict=True):
        rows = np.flatnonzero(step.access_buffer == buffer).tolist()
        ops = [int(step.access_op[row]) % k for row in rows]
        at = ops.index(last)
        back = rows[at::-1] + (rows[:at:-1] if step.persistent[buffer] else [])
        kept = False
        for row in back:
            if step.access_writes[row] or (kept := (buffer, int(step.access_op[row]) % k) in ended):
                break
        good.append(kept)
    return good


@given(st.data())
@settings(max_examples=40)
def test_skippable_copies_equal_a_walk_along_the_accesses(data: st.DataObject) -> None:
    step, link = data.draw(steps()), data.draw(links())
    schedule = data.draw(schedules(step))
    good = np.array(good_copies(step, schedule), np.bool_)
    replay(step, link, dataclasses.replace(schedule, copied=~good))
    for row in np.flatnonzero(~good).tolist():
        copied = ~good
        copied[row] = False
        with pytest.raises(PlanError, match=f"move {row} .* no copy"):
            replay(step, link, dataclasses.replace(schedule, copied=copied))


@pytest.mark.parametrize("name", PRESETS)
def test_link_is_parsed_from_a_name_or_numbers(name: str) -> None:
    assert parse_link(name) == PRESETS[name]
    assert not parse_link(f"{name},half").duplex
    assert parse_link("1e-5,8e-11") == Link(1e-5, 8e-11, 1e-5, 8e-11)
    assert parse_link("1e-5,8e-11,2e-5,9e-11,half") == Link(1e-5, 8e-11, 2e-5, 9e-11, duplex=False)


@pytest.mark.parametrize(
    "text",
    ["", "pcie", "1", "a,b", "1,2,3", "-1,2", "1e999,1", "1e300,1", "1001,0", "0,0.01", "nan,1", "1,2,3,4,5"],
)
def test_invalid_link_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="link"):
        parse_link(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"seconds": np.full(10, np.nan)},
        {"seconds": np.full(10, -1.0)},
        {"size": np.array([-1, 1])},
        {"size": np.array([1])},
        {"start": np.array([20, 0])},
        {"end": np.array([0, 10])},
        {"end": np.array([11, 10])},
        {"access_buffer": np.full(13, 2)},
        {"access_op": np.arange(13)},
        {"persistent": np.array([True, True])},
    ],
)
def test_invalid_step_is_refused(changes: dict[str, np.ndarray]) -> None:
    with pytest.raises(PlanError):
        dataclasses.replace(chain(), **changes)

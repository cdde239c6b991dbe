"""Patterns of iterations: found, compared, and their transitions."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from traces import EventType, Trace, workload
from traces.iterations.pattern import find_patterns
from traces.iterations.transitions import sequence_key
from traces.iterations.windows import FIRST_WINDOWS, LAST_WINDOWS, find_windows


class Recorder:
    """Writer of a trace by hand, with generated ids and times."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int]] = []
        self._next = 0

    def alloc(self, size: int, thread: int = 0) -> int:
        self.rows.append((EventType.ALLOC, self._next, size, thread))
        self._next += 1
        return self._next - 1

    def free(self, buffer: int) -> None:
        self.rows.append((EventType.FREE, buffer, 0, 0))

    def mark(self) -> None:
        self.rows.append((EventType.MARK, -1, 0, 0))

    def trace(self) -> Trace:
        kind, buffer, size, thread = np.array(self.rows).T
        return Trace.of(kind, buffer, size, thread=thread)


@given(
    n=st.integers(20, 300),
    seed=st.integers(0, 10**6),
    replaced=st.sampled_from([0.0, 0.2, 1.0]),
    marks=st.booleans(),
)
def test_generated_iteration_is_found_with_sizes_and_load(
    n: int, seed: int, replaced: float, marks: bool
) -> None:
    trace = workload.generate(n, seed, iterations=6, replaced=replaced)
    everything = workload.buffers(n, seed, replaced=replaced)
    truth = everything.select(~everything.persistent)
    truth = truth.select(truth.size > 512)
    assume(marks or len(truth) >= 12)  # fewer allocations, repeated six times, are no evidence
    if not marks:
        keep = trace.kind != EventType.MARK
        trace = Trace.of(trace.kind[keep], trace.buffer[keep], trace.size[keep])
    found = find_patterns(trace)
    assert found
    buffers = found[0].buffers
    assert buffers.period == len(truth)
    assert trace.size[found[0].event].tolist() == buffers.size.tolist()
    assert found[0].begins[-1] == found[0].event[0]
    assert len(found[0].begins) == found[0].iterations
    assert found[0].unresolved == 0
    assert not buffers.persistent.any()
    in_order = truth.size[np.argsort(truth.start, kind="stable")]
    if marks:
        assert np.array_equal(buffers.size, in_order)
    assert sorted(buffers.size) == sorted(in_order)
    assert _peak(buffers) == _peak(truth)


def _peak(buffers: object) -> int:
    """Return the peak load on the circle by brute force over every time unit."""
    period = buffers.period  # type: ignore[attr-defined]
    load = np.zeros(period, np.int64)
    for start, end, size in zip(buffers.start, buffers.end, buffers.size, strict=True):  # type: ignore[attr-defined]
        for turn in range(int((end - 1) // period) + 1):
            low, high = max(start - turn * period, 0), min(end - turn * period, period)
            load[low:high] += size
    return int(load.max())


def test_number_of_examined_iterations_is_bounded() -> None:
    """The search must not slow down late in a program; the warm-up is still found."""
    record = Recorder()
    for size in (5000, 7000, 9000):
        record.alloc(size)
    for _ in range(5000):
        record.free(record.alloc(1000))
    (cut,) = find_windows(record.trace(), 512)
    assert len(cut.bounds) <= FIRST_WINDOWS + LAST_WINDOWS < cut.count == 4999
    (pattern,) = find_patterns(record.trace())
    assert pattern.iterations_seen == 4999
    assert pattern.warm_up is not None
    assert pattern.warm_up.size.tolist() == [5000, 7000, 9000]


def test_a_rare_iteration_is_found_among_very_many_others() -> None:
    record = Recorder()
    for _ in range(6):
        for _ in range(1200):
            record.mark()
            record.free(record.alloc(1000))
        record.mark()
        for buffer in [record.alloc(size) for size in (5000, 7000, 9000)]:
            record.free(buffer)
    record.mark()
    found = find_patterns(record.trace())
    assert [pattern.buffers.size.tolist() for pattern in found] == [[5000, 7000, 9000], [1000]]
    assert found[0].iterations == 6


def test_the_latest_free_of_all_iterations_counts() -> None:
    r = Recorder()
    for late in (0, 2, 1, 0, 1):
        r.mark()
        first = r.alloc(5000)
        for i in range(4):
            r.free(r.alloc(6000 + i))
            if i == late:
                r.free(first)
    r.mark()
    (pattern,) = find_patterns(r.trace())
    assert pattern.buffers.end[0] == 4  # alive for the third temporary, which is allocation 3
    assert pattern.lasting[0] == 3  # in all iterations but one, alive for the second only


def test_parameter_at_the_position_of_a_gradient_is_persistent() -> None:
    r = Recorder()
    for iteration in range(12):
        gradients = [r.alloc(size) for size in (7000, 9000)]
        if iteration == 0:
            kept = [r.alloc(size) for size in (7000, 9000)]
        for _ in range(4):
            r.free(r.alloc(8000))
        for gradient in gradients:
            r.free(gradient)
    pattern = find_patterns(r.trace())[0]
    assert not pattern.buffers.persistent.any()
    assert pattern.warm_up is not None
    # The warm-up includes the parameters, and gives them no position.
    trace = r.trace()
    rows = np.flatnonzero(trace.kind == EventType.ALLOC)
    for buffer in kept:
        at = int(np.flatnonzero(trace.buffer[rows] == buffer)[0])
        assert at < len(pattern.warm_up.size)
        assert pattern.warm_up.position[at] == -1


def test_accumulating_buffers_are_left_out() -> None:
    r = Recorder()
    for _ in range(12):
        r.mark()
        r.alloc(3000)
        r.free(r.alloc(4000))
    r.mark()
    (pattern,) = find_patterns(r.trace())
    assert pattern.buffers.persistent.tolist() == [True, False]


@pytest.mark.parametrize("in_step", [True, False])
def test_threads_share_addresses_only_if_their_order_never_changed(in_step: bool) -> None:
    r = Recorder()
    for iteration in range(6):
        r.mark()
        main = r.alloc(50_000)
        r.free(main)
        swap = not in_step and iteration % 2 == 1
        for thread, size in ((1, 3000), (2, 4000))[:: -1 if swap else 1]:
            r.free(r.alloc(size, thread))
    r.mark()
    pattern = find_patterns(r.trace())[0]
    groups = dict(zip(pattern.sequence.tolist(), pattern.buffers.group.tolist(), strict=True))
    assert (groups[1] == groups[2]) == in_step


def test_varying_thread_is_left_out() -> None:
    r = Recorder()
    for iteration in range(6):
        r.mark()
        r.free(r.alloc(50_000))
        r.free(r.alloc(1000 * (iteration + 1), 1))
    r.mark()
    pattern = find_patterns(r.trace())[0]
    assert set(pattern.sequence.tolist()) == {0}


@given(
    periods=st.lists(st.integers(9, 40), min_size=2, max_size=4),
    lifetime=st.integers(1, 60),
    seed=st.integers(0, 10**6),
)
def test_unsynchronised_threads_are_planned_separately(periods: list[int], lifetime: int, seed: int) -> None:
    """With bursts of any length each thread has the buffers of a separate trace, in a separate group."""
    rng = np.random.default_rng(seed)
    sizes = [rng.permutation(1000) + 600 for _ in periods]
    together, alone = Recorder(), [Recorder() for _ in periods]
    alive: list[list[tuple[int, int]]] = [[] for _ in periods]
    done = [0] * len(periods)
    while min(d / p for d, p in zip(done, periods, strict=True)) < 8:
        thread = int(rng.integers(len(periods)))
        for _ in range(int(rng.integers(1, 30))):
            size = int(sizes[thread][done[thread] % periods[thread]])
            alive[thread].append((together.alloc(size, thread), alone[thread].alloc(size)))
            if len(alive[thread]) > lifetime:
                both = alive[thread].pop(0)
                together.free(both[0])
                alone[thread].free(both[1])
            done[thread] += 1
    trace = together.trace()
    allocations = trace.thread[trace.kind == EventType.ALLOC]
    # A thread without allocations in the second half has ended.
    assume(len(np.unique(allocations[len(allocations) // 2 :])) == len(periods))
    pattern = find_patterns(trace)[0]
    assert pattern.buffers.period == sum(periods)
    groups = [set(pattern.buffers.group[pattern.sequence == k].tolist()) for k in range(len(periods))]
    assert sorted(groups, key=min) == [{k} for k in range(len(periods))]
    for thread, recorder in enumerate(alone):
        own = find_patterns(recorder.trace())[0].buffers
        rows = np.flatnonzero(pattern.sequence == thread)
        begin = int(np.flatnonzero(own.size == pattern.buffers.size[rows[0]])[0])
        assert np.array_equal(pattern.buffers.size[rows], np.roll(own.size, -begin))
        turn, place = np.divmod(pattern.buffers.end[rows], sum(periods))
        lives = turn * len(rows) + np.searchsorted(rows, place) - np.arange(len(rows))
        assert np.array_equal(lives, np.roll(own.lengths, -begin))


def test_variants_become_separate_patterns_the_latest_first() -> None:
    r = Recorder()
    for size in (3000, 4000, 3000, 4000, 3000):
        r.mark()
        r.free(r.alloc(size))
    r.mark()
    assert [p.buffers.size.tolist() for p in find_patterns(r.trace())] == [[3000], [4000]]


def test_marks_of_phases_lie_within_iterations() -> None:
    """Marks of a training recorder in the middle of a step do not change the result."""

    def trace(*phases: str) -> Trace:
        kind, buffer, operation, names = [EventType.MARK], [-1], [0], ("step", *phases)
        for step in range(4):
            for at in range(2):
                kind += [EventType.MARK] * bool(phases) + [EventType.ALLOC]
                buffer += [-1] * bool(phases) + [2 * step + at]
                operation += [1 + at] * bool(phases) + [-1]
            kind += [EventType.FREE, EventType.FREE, EventType.MARK]
            buffer += [2 * step, 2 * step + 1, -1]
            operation += [-1, -1, 0]
        sizes = [4096 << (b % 2) if k == EventType.ALLOC else 0 for k, b in zip(kind, buffer, strict=True)]
        return Trace.of(kind, buffer, sizes, operation=operation, names=names)

    (plain,), (phased,) = find_patterns(trace()), find_patterns(trace("forward", "backward"))
    assert plain.iterations == phased.iterations
    assert plain.buffers.size.tolist() == phased.buffers.size.tolist() == [4096, 8192]


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.sampled_from([600, 5000, 90_000])), max_size=5),
        min_size=2,
        max_size=9,
    ),
    st.booleans(),
)
def test_search_tolerates_threads_that_come_and_go(
    iterations: list[list[tuple[int, int]]], marks: bool
) -> None:
    """The heaviest thread may be any, in all iterations or in the last one."""
    r = Recorder()
    for iteration in iterations:
        if marks:
            r.mark()
        for buffer in [r.alloc(size, thread) for thread, size in iteration]:
            r.free(buffer)
    r.mark()
    for pattern in find_patterns(r.trace()):
        assert len(pattern.sequence) == len(pattern.buffers)
        assert pattern.iterations >= 2


@given(seed=st.integers(0, 10**6), last=st.integers(0, 400), accident=st.integers(0, 5))
def test_iterations_are_found_before_the_last_work_of_a_finished_program(
    seed: int, last: int, accident: int
) -> None:
    """A report at the end and one odd allocation do not hide the longest run of iterations."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1_000, 9_000, 20)
    program = Recorder()
    for iteration in range(30):
        kept = [program.alloc(int(size)) for size in sizes]
        if iteration == accident:
            program.free(program.alloc(777))
        while kept:
            program.free(kept.pop())
    for size in rng.integers(10_000, 10**6, last):
        program.free(program.alloc(int(size)))
    found = find_patterns(program.trace(), anywhere=True)
    assert found
    assert np.array_equal(np.sort(found[0].buffers.size), np.sort(sizes))
    assert found[0].iterations >= 20
    assert found[0].coverage == 1


@pytest.mark.parametrize("kept", [40, 100])
def test_lifetimes_identify_the_iteration_of_equal_sizes(kept: int) -> None:
    """One of seven equal buffers per iteration lives longer: by the sizes alone the period is one."""
    recorder, window = Recorder(), list[int]()
    for _ in range(300):
        window.append(recorder.alloc(4096))
        if len(window) > kept // 7:
            recorder.free(window.pop(0))
        for _ in range(3):
            one, other = recorder.alloc(4096), recorder.alloc(4096)
            recorder.free(one)
            recorder.free(other)
    (pattern,) = find_patterns(recorder.trace(), whole_recording=False)
    assert len(pattern.buffers) == 7
    assert not pattern.buffers.persistent.any()
    assert sorted(pattern.buffers.lengths.tolist())[-1] > 16


def test_equal_sizes_with_random_lifetimes_have_no_pattern() -> None:
    """A slot for the longest lifetime of each position would take many times the peak load."""
    random = np.random.default_rng(1)
    recorder, ends = Recorder(), dict[int, list[int]]()
    for at in range(6000):
        one = recorder.alloc(4096)
        ends.setdefault(at + (300 if random.random() < 0.01 else 2), []).append(one)
        for over in ends.pop(at, []):
            recorder.free(over)
    assert find_patterns(recorder.trace(), whole_recording=False) == []


#: Sizes allocated by each variant of iteration; all buffers but the kept ones are freed at once.
KINDS = {"a": [1000, 2000, 3000, 4000], "b": [1100, 2100, 3100], "c": [1200, 2200, 3200, 4200, 5200]}


def program(order: list[str], kept: dict[str, int], frees: dict[tuple[str, str], int]) -> Trace:
    """Return iterations in this order, each keeping a buffer for some allocations of the next."""
    rows: list[tuple[int, int, int]] = []
    held: list[tuple[int, int]] = []  # buffer, allocations of this iteration before its free
    count = 0
    for kind, follower in zip(order, [*order[1:], ""], strict=True):
        rows.append((EventType.MARK, -1, 0))
        here, held = held, []
        for place, size in enumerate(KINDS[kind]):
            rows += [(EventType.FREE, buffer, 0) for buffer, when in here if when == place]
            rows.append((EventType.ALLOC, count, size))
            if place == kept[kind]:
                held.append((count, frees.get((kind, follower), 0)))
            else:
                rows.append((EventType.FREE, count, 0))
            count += 1
        rows += [(EventType.FREE, buffer, 0) for buffer, when in here if when == len(KINDS[kind])]
    kind_of, buffer, size_of = np.array(rows).T
    return Trace.of(kind_of, buffer, size_of)


@given(seed=st.integers(0, 10**6))
def test_reach_matches_the_frees_of_the_program(seed: int) -> None:
    chance = random.Random(seed)
    order = chance.choices(list(KINDS), k=60)
    kept = {kind: chance.randrange(len(sizes)) for kind, sizes in KINDS.items()}
    frees = {(a, b): chance.randint(0, len(KINDS[b])) for a in KINDS for b in KINDS}
    keys = {
        kind: sequence_key(np.array(sizes), np.zeros(len(sizes), np.int32)) for kind, sizes in KINDS.items()
    }
    found = {pattern.key: pattern for pattern in find_patterns(program(order, kept, frees))}
    assert set(found) <= set(keys.values())
    followed = set(itertools.pairwise(order[:-1]))
    for kind, key in keys.items():
        if key not in found:
            continue
        reach = found[key].reach
        assert {follower for follower, k in keys.items() if k in reach} <= {
            b for a, b in followed if a == kind
        }
        for follower in KINDS:
            if (kind, follower) in followed and keys[follower] in found:
                expected = np.zeros(len(KINDS[kind]), np.int64)
                expected[kept[kind]] = frees[kind, follower]
                assert reach[keys[follower]].tolist() == expected.tolist()


def test_reach_is_empty_if_a_sequence_varies() -> None:
    """The order of events in the next iteration then varies, too."""
    rows: list[tuple[int, int, int, int]] = []
    count = 0
    for number in range(12):
        rows.append((EventType.MARK, -1, 0, 0))
        for place in range(6):
            for thread in (0, 1) if (place + number) % 2 else (1, 0):
                rows.append((EventType.ALLOC, count, 1000 * (thread + 1) + place, thread))
                rows.append((EventType.FREE, count, 0, thread))
                count += 1
    kind, buffer, size, thread = np.array(rows).T
    found = find_patterns(Trace.of(kind, buffer, size, thread=thread))
    assert found
    assert not any(pattern.reach for pattern in found)

"""Steps of traces with accesses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solvers import PlanError
from solvers.swap import step_of
from solvers.swap.absences import absences_of
from solvers.swap.step_of_trace import iteration_of
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


@given(programs())
def test_iteration_is_a_circle_with_the_load_of_the_steady_state(made: tuple[Trace, int]) -> None:
    trace, k = made
    step = step_of(trace)
    first, end = iteration_of(trace) or (0, 0)
    assert step.circular
    assert len(step) == k
    assert step.peak_bytes == trace.load()[first:end].max()
    assert step.duration == pytest.approx(k * 1e-8)
    touched = ((trace.kind == EventType.READ) | (trace.kind == EventType.WRITE))[first:end].sum()
    assert len(step.access_op) == touched
    absences_of(step)


@given(programs())
def test_whole_trace_is_a_line(made: tuple[Trace, int]) -> None:
    trace, k = made
    step = step_of(trace, whole=True)
    assert not step.circular
    assert len(step) == 6 * k
    assert step.peak_bytes == trace.load().max()
    assert len(step.access_op) == ((trace.kind == EventType.READ) | (trace.kind == EventType.WRITE)).sum()


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


def test_times_may_be_given() -> None:
    program = Program()
    made = program.operation(0, 100, [])
    program.operation(1, 300, [made])
    trace = program.trace()
    assert step_of(trace, bandwidth=100.0).seconds.tolist() == [1.0, 4.0]
    assert step_of(trace, seconds=lambda step: np.full(len(step), 2.0)).duration == 4.0


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

"""Random steps for offload planning, and traces of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from solvers.swap import Link, Schedule, Step
from solvers.swap.absences import absences_of
from traces import EventType, Trace


def step_from(
    seconds: list[float],
    buffers: list[tuple[int, list[tuple[int, bool]]]],
    *,
    circular: bool = False,
    persistent: set[int] | None = None,
) -> Step:
    """Return a step of buffers (size, [(operation, writes), ...]) alive from first to last access."""
    always, k = persistent or set(), len(seconds)
    owner = [b for b, (_, accesses) in enumerate(buffers) for _ in accesses]
    return Step(
        seconds=np.array(seconds),
        operation=np.full(k, -1),
        start=np.array([0 if b in always else a[0][0] for b, (_, a) in enumerate(buffers)], np.int64),
        end=np.array([k if b in always else a[-1][0] + 1 for b, (_, a) in enumerate(buffers)], np.int64),
        size=np.array([size for size, _ in buffers], np.int64),
        persistent=np.array([b in always for b in range(len(buffers))], np.bool_),
        ids=np.arange(len(buffers)),
        access_buffer=np.array(owner, np.int64),
        access_op=np.array([op for _, accesses in buffers for op, _ in accesses], np.int64),
        access_writes=np.array([w for _, accesses in buffers for _, w in accesses], np.bool_),
        circular=circular,
    )


@st.composite
def steps(
    draw: Callable[..., object], *, most_ops: int = 12, most_buffers: int = 8, circles: bool = True
) -> Step:
    """Draw a step of a few operations and buffers, on a line or on a circle."""
    k = draw(st.integers(2, most_ops))
    circular = circles and draw(st.booleans())
    seconds = [draw(st.sampled_from([0.5, 1.0, 2.0, 0.25])) for _ in range(k)]
    buffers, always = [], set()
    for b in range(draw(st.integers(1, most_buffers))):
        if circular and draw(st.booleans()):
            always.add(b)
        wraps = circular and b not in always and draw(st.booleans())
        first = draw(st.integers(0, k - 1))
        end = k + (first if wraps else 0)
        span = range(k) if b in always else range(first, end)
        ops = sorted({draw(st.sampled_from(list(span))) for _ in range(draw(st.integers(1, 4)))})
        if b not in always and ops[0] >= k:
            ops = [op - k for op in ops]
        buffers.append((draw(st.integers(1, 8)), [(op, draw(st.booleans())) for op in ops]))
    return step_from(seconds, buffers, circular=circular, persistent=always)


def one_move(row: tuple[int, int, int, int, int, int], *, copied: bool = True) -> Schedule:
    """Return a schedule of one move: the buffer's row, then last, out, release, fetch and use."""
    buffer, last, out, release, fetch, use = (np.array([x]) for x in row)
    return Schedule(buffer, last, out, release, fetch, use, np.array([copied]))


@st.composite
def links(draw: Callable[..., object]) -> Link:
    rate = st.sampled_from([0.0625, 0.125, 0.25, 0.5, 1.0])
    fixed = st.sampled_from([0.0, 0.125, 0.5])
    return Link(draw(fixed), draw(rate), draw(fixed), draw(rate), draw(st.booleans()))


@st.composite
def schedules(draw: Callable[..., object], step: Step) -> Schedule:
    """Draw a possible schedule."""
    a, rows = absences_of(step), []
    for row in range(len(a)):
        last, use = int(a.last[row]), int(a.use[row])
        if use - last < 2 or draw(st.booleans()):
            continue
        release = draw(st.integers(last + 1, use - 1))
        rows.append(
            (a.buffer[row], last, draw(st.integers(last, release - 1)), release,
             draw(st.integers(release + 1, use)), use, True)
        )  # fmt: skip
    return Schedule(*zip(*rows, strict=True)) if rows else Schedule.empty()


def slow_loads(step: Step, schedule: Schedule) -> list[int]:
    """Return the bytes during each operation, instance by instance."""
    k, turns = len(step), 6
    result = []
    for op in range(k):
        now = op + 3 * k
        total = 0
        for b in range(len(step.size)):
            for turn in range(turns):
                start, end = int(step.start[b]) + turn * k, int(step.end[b]) + turn * k
                if not step.circular and turn != 3:
                    continue
                if start <= now < end:
                    total += int(step.size[b])
        for row in range(len(schedule)):
            for turn in range(turns) if step.circular else [3]:
                if schedule.release[row] + turn * k <= now < schedule.fetch[row] + turn * k:
                    total -= int(step.size[schedule.buffer[row]])
        result.append(total)
    return result


class _Slow:
    """Program that makes the moves, and its copy engines."""

    def __init__(self, step: Step, link: Link, schedule: Schedule) -> None:
        self.step, self.link, self.moves = step, link, schedule
        self.size = step.size[schedule.buffer].tolist()
        self.free = {"out": 0.0, "in": 0.0}
        self.done: dict[tuple[str, int, int], float] = {}
        self.now = 0.0

    def due(self, column: str, op: int, turn: int) -> list[tuple[int, int]]:
        """Return the moves due at an operation, and the turns in which they began."""
        k = len(self.step)
        at = [(row, int(time)) for row, time in enumerate(getattr(self.moves, column))]
        found = [(row, turn - time // k) for row, time in at if time % k == op and turn >= time // k]
        first = self.moves.release if column == "out" else self.moves.use
        return sorted(found, key=lambda move: (int(first[move[0]]), move[0]))

    def copy(self, engine: str, row: int, turn: int, seconds: float) -> None:
        queue = engine if self.link.duplex else "out"
        self.free[queue] = max(self.free[queue], self.now) + seconds
        self.done[engine, row, turn] = self.free[queue]

    def wait(self, engine: str, row: int, turn: int) -> None:
        self.now = max(self.now, self.done[engine, row, turn])

    def operation(self, op: int, turn: int) -> None:
        for row, began in self.due("release", op, turn):
            self.wait("out", row, began)
        for row, began in self.due("fetch", op, turn):
            self.copy("in", row, began, self.link.in_fixed + self.link.in_per_byte * self.size[row])
        for row, began in self.due("use", op, turn):
            self.wait("in", row, began)
        self.now += float(self.step.seconds[op])
        for row, began in self.due("out", op, turn):
            self.copy("out", row, began, self.link.out_fixed + self.link.out_per_byte * self.size[row])


def slow_stall(step: Step, link: Link, schedule: Schedule, turns: int) -> float:
    """Return the mean stall of the later half of so many turns."""
    program, ends = _Slow(step, link, schedule), []
    for turn in range(turns):
        for op in range(len(step)):
            program.operation(op, turn)
        ends.append(program.now)
    half = turns // 2  # turns may alternate
    before = ends[half - 1] if half else 0.0
    return (ends[-1] - before) / (turns - half) - float(step.seconds.sum())


MIB = 1 << 20


def training(*, marks: bool = True, layers: int = 6, accesses: bool = True) -> Trace:
    """Alike iterations: a parameter, and a buffer for each layer, written forward and read backward."""
    rows: list[tuple[int, int, int, int, int]] = [(EventType.ALLOC, 0, MIB, 0, -1)]
    count, now = 1, 0
    for _ in range(4 if marks else 12):
        if marks:
            rows.append((EventType.MARK, -1, 0, now, 2))
        first = count
        for layer in range(2 * layers):
            forward = layer < layers
            buffer = first + (layer if forward else 2 * layers - 1 - layer)
            if forward:
                rows.append((EventType.ALLOC, buffer, (8 if marks else 1 + layer) * MIB, now, 0))
            if accesses:
                rows.append((EventType.READ, 0, 0, now, 0 if forward else 1))
                rows.append(
                    (EventType.WRITE if forward else EventType.READ, buffer, 0, now, 0 if forward else 1)
                )
            now += 1_000_000
            if not forward:
                rows.append((EventType.FREE, buffer, 0, now, -1))
        count += layers
    if marks:
        rows.append((EventType.MARK, -1, 0, now, 2))
    columns = [list(column) for column in zip(*rows, strict=True)]
    return Trace.of(
        *columns[:3],
        time_ns=columns[3],
        operation=columns[4],
        names=("forward", "backward", "step"),
        metadata={"time": "operation"},
    )

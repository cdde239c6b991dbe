"""Scene of a page: timelines of devices or of an iteration, and views of each timeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mempool.show.timeline import Timeline, timeline_of
from mempool.show.view import View, plan_view, recorded_view, segments_of
from solvers.simulators.recorded import recorded_segments
from traces.buffers import Buffers, buffers_of
from traces.completeness import device_free
from traces.trace import EventType, Trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from solvers import Plan


@dataclass(frozen=True)
class Scene:
    """The content of a page: timelines, and views that name their timeline.

    Attributes:
        title: one line.
        timelines: at least one.
        views: at least one for each timeline.
        picture: the initial picture, "stacked" or "addresses".
        opens: index of the initial view; None for the first view of the fullest timeline.
    """

    title: str
    timelines: tuple[Timeline, ...]
    views: tuple[View, ...]
    picture: str = "stacked"
    opens: int | None = None


def scene_of(
    what: Trace | Buffers,
    *,
    plan: Plan | None = None,
    planned: Buffers | None = None,
    allocators: Sequence[str] = (),
    title: str = "mempool",
) -> Scene:
    """Return a scene of a trace, or of buffers, with all available views.

    A trace has a timeline for each device, with a view of the recorded addresses and a view for each of
    ``allocators``. Without any addresses, a greedy plan is made. The initial picture shows addresses if a
    plan or allocators are given.

    Args:
        what: a trace, or buffers.
        plan: a plan with offsets, or None.
        planned: the buffers of the plan, row by row; by default those of the trace, or the given buffers.
        allocators: names among `mempool.simulate.ALLOCATORS`, with settings as ``mempool compare`` takes
            them: "pytorch:max_split_size_mb=128"; only for a trace.
        title: one line.

    Raises:
        TraceError: the trace contradicts itself.
        ValueError: the plan is for other buffers or without offsets, an allocator does not exist, allocators
            are given without a trace or without a history, or the sum of all bytes exceeds 64 bits.
    """
    if allocators and not isinstance(what, Trace):
        raise ValueError("allocators are simulated on traces; these are buffers")
    timelines: list[Timeline] = []
    views: list[View] = []
    bare: list[Buffers] = []  # buffers of timelines that may lack a view
    for device, part, free in _by_device(what) if isinstance(what, Trace) else ():
        buffers = buffers_of(part)
        timelines.append(timeline_of(buffers, device, trace=part, free=free))
        views += _views_of(part, timelines[-1], len(timelines) - 1, allocators)
        bare.append(buffers)
    if allocators and all(timeline.still for timeline in timelines):
        raise ValueError(
            "allocators are simulated on events, and none were recorded: the state at the end is known"
        )
    if plan is not None:
        placed = planned or (what if isinstance(what, Buffers) else buffers_of(what))
        _add_plan(timelines, views, bare, plan, placed)
    elif isinstance(what, Buffers):
        timelines.append(timeline_of(what, _called(what)))
        bare.append(what)
    for at, buffers in enumerate(bare):
        if all(view.timeline != at for view in views):
            timelines[at], view = _planned(buffers, timelines[at], at)
            views.append(view)
    opens = None if plan is None else next(k for k, view in enumerate(views) if view.title == "plan")
    still = all(timeline.still for timeline in timelines)
    picture = "addresses" if still or allocators or plan is not None else "stacked"
    return Scene(title, tuple(timelines), tuple(views), picture, opens)


def _by_device(trace: Trace) -> Iterator[tuple[str, Trace, NDArray[np.int64]]]:
    """Yield (title, events, free bytes at each refused request) of each device."""
    free, refused = device_free(trace), trace.device[trace.kind == EventType.REFUSED]
    devices = trace.devices
    if not devices:
        yield "trace", trace, free
    for device in devices:
        title = "trace" if len(devices) == 1 else f"device {device}"
        yield title, trace.on_device(device), free[refused == device]


def _views_of(trace: Trace, timeline: Timeline, at: int, allocators: Sequence[str]) -> list[View]:
    """Return views of the recorded addresses, if known, and of the simulated addresses."""
    from mempool.analysis.compare import parse_allocator
    from mempool.simulate import simulate

    allocs, since = trace.kind == EventType.ALLOC, timeline.since
    views = []
    if (trace.address[allocs] >= 0).any():
        held = segments_of(recorded_segments(trace), since=since, end=len(trace))
        views.append(recorded_view("recorded", at, timeline, trace.address[allocs], held))
    for name in () if timeline.still else allocators:
        choice = parse_allocator(name)
        done = simulate(trace, choice.allocator, **choice.settings)
        segments = segments_of(done.segments, since=since, end=len(trace))
        views.append(recorded_view(name, at, timeline, done.address[allocs], segments))
    return views


def _add_plan(
    timelines: list[Timeline], views: list[View], bare: list[Buffers], plan: Plan, placed: Buffers
) -> None:
    """Add a view of a plan, on the trace's timeline if the plan covers all its buffers."""
    if plan.offset is None or len(plan.offset) != len(placed):
        raise ValueError("a plan for other buffers, or without offsets")
    at = next((k for k, one in enumerate(bare) if _same(one, placed)), None)
    if at is None:
        at = len(timelines)
        timelines.append(timeline_of(placed, _called(placed), columns=plan.columns))
    views.append(plan_view("plan", at, timelines[at], plan))


def _same(one: Buffers, other: Buffers) -> bool:
    names = ("start", "end", "size")
    return one.period == other.period and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in names
    )


def _planned(buffers: Buffers, timeline: Timeline, at: int) -> tuple[Timeline, View]:
    """Plan the buffers and return a view; a circular timeline has the length of the addresses' period."""
    from solvers import solve

    plan = solve(buffers, solver="greedy")
    if buffers.period is not None:
        timeline = timeline_of(buffers, timeline.title, columns=plan.columns)
    return timeline, plan_view("planned, greedy", at, timeline, plan)


def _called(buffers: Buffers) -> str:
    return "buffers" if buffers.period is None else "iteration"

"""Scene of a step with offloading: buffers on the device, absences, and copies on the host."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from mempool.show.scene import Scene
from mempool.show.timeline import Timeline, timeline_of
from mempool.show.view import Moved, View, plan_view
from mempool.units import binary
from solvers.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from solvers.packing.plan import Stop
    from solvers.swap import Link, ReplayResult, Schedule, Step
    from solvers.swap.placement import Placed

#: Number of operations whose clock is kept; between them the clock is interpolated.
_KNOTS = 4096
#: Longest accepted step in seconds: the nanoseconds of several steps must fit 64 bits.
_MOST_SECONDS = 1e8


def swap_scene(
    step: Step,
    link: Link,
    schedule: Schedule,
    *,
    limit: int | None = None,
    title: str = "mempool",
    stop: Stop | None = None,
) -> Scene:
    """Return the scene of a step under a schedule, replayed, checked and placed: both device and host arena.

    Time counts operations. On a circle some turns of the steady state are drawn.

    Args:
        step: the step.
        link: the time that copies take.
        schedule: the moves.
        limit: limit in bytes that the schedule was planned for.
        title: one line.
        stop: stop criterion of the solver of either arena.

    Raises:
        PlanError: no program could make these moves, or nothing moves.
    """
    from solvers.swap import replay
    from solvers.swap.placement import place

    if not len(schedule) and not len(schedule.resting):
        raise PlanError("nothing moves")
    did = replay(step, link, schedule)
    if not did.iteration_seconds <= _MOST_SECONDS:
        raise PlanError(f"a step of more than {_MOST_SECONDS:.0f} seconds")
    device, host = place(step, schedule, stop=stop)
    notes = (_device_note(step, did, schedule, limit), f"{binary(did.host_bytes)} at most at a time")
    stays, view = _placed(step, did, device, device.of, 0, "device, with swaps")
    stays = dataclasses.replace(stays, before=_before(step, stays), note=notes[0])
    view = dataclasses.replace(view, moved=_moved(step, schedule, stays, view))
    copies, below = _placed(step, did, host, host.of, 1, "host, copies")
    return Scene(title, (stays, dataclasses.replace(copies, note=notes[1])), (view, below), "addresses", 0)


def with_swaps(swaps: Scene, scene: Scene) -> Scene:
    """Return both scenes merged, the swaps first."""
    shift = len(swaps.timelines)
    later = [dataclasses.replace(view, timeline=view.timeline + shift) for view in scene.views]
    timelines, views = swaps.timelines + scene.timelines, (*swaps.views, *later)
    return dataclasses.replace(swaps, title=scene.title, timelines=timelines, views=views)


def _device_note(step: Step, did: ReplayResult, schedule: Schedule, limit: int | None) -> str:
    parts = [f"{binary(step.peak_bytes)} without swaps (grey)"]
    parts += [] if limit is None else [f"planned for {binary(limit)}"]
    moves = f"{len(schedule):,} moves" if len(schedule) > 1 else "1 move"
    parts.append(f"{moves} of {binary(did.returned_bytes)} in a step")
    parts.append(f"which takes {did.stall_seconds / max(step.duration, 1e-12):.1%} longer")
    return " \u00b7 ".join(parts)


def _placed(
    step: Step, did: ReplayResult, placed: Placed, of: NDArray[np.int64], at: int, title: str
) -> tuple[Timeline, View]:
    """Return a timeline and the view of a plan; each residence of a step's buffer is a piece."""
    made = timeline_of(placed.buffers, title, columns=placed.plan.columns)
    view = plan_view("planned", at, made, placed.plan)
    born = np.where(step.persistent, -1, step.operation[step.start]) if len(step.size) else step.start
    unknown = np.full(len(step.size), -1)
    timeline = dataclasses.replace(
        made,
        owner=of[made.owner],
        size=step.size,
        stream=unknown,
        operation=born.astype(np.int64),
        frame=unknown,
        module=unknown,
        category=unknown,
        stack=unknown,
        pool=np.zeros(len(step.size), np.int64),
        names=step.names,
        ids=tuple(map(str, step.ids.tolist())),
        clock=_clock(step, did, _turns(step, made)),
        ticks="operations",
        at=step.operation.astype(np.int64),
    )
    return timeline, view


def _turns(step: Step, timeline: Timeline) -> int:
    return max(-(-int(timeline.end.max(initial=0)) // max(len(step), 1)), 1)


def _clock(step: Step, did: ReplayResult, turns: int) -> NDArray[np.int64]:
    """Return the start times of operations, waits included, at some operations of all turns."""
    late = np.cumsum(did.wait)
    begins = step.begins[:-1] + late
    length = step.duration + float(late[-1])
    every = np.concatenate([begins + turn * length for turn in range(turns)] + [[turns * length]])
    some = np.unique(np.linspace(0, len(every) - 1, _KNOTS).astype(np.int64))
    return np.stack([some, (every[some] * 1e9).astype(np.int64)])


def _before(step: Step, timeline: Timeline) -> NDArray[np.int64]:
    """Return times and the step's own load from each time until the next, int64[2, k]."""
    load = np.append(np.tile(step.load, _turns(step, timeline)), 0)
    changed = np.append(True, load[1:] != load[:-1])
    return np.stack([np.flatnonzero(changed), load[changed]])


def _moved(step: Step, schedule: Schedule, timeline: Timeline, view: View) -> Moved:
    """Return the absences in all drawn turns, clipped at both ends of time."""
    k, s, turns = len(step), schedule, _turns(step, timeline)
    most = turns * k
    first = k * np.arange(-1 if step.circular else 0, turns)
    shift = np.repeat(first, len(s))
    row, out, gone, back, use = (
        np.tile(column, len(first)) for column in (s.buffer, s.out + 1, s.release, s.fetch, s.use)
    )
    out, gone, back, use = out + shift, gone + shift, back + shift, use + shift
    left = _address(timeline, view, row, timeline.end, gone)
    found = _address(timeline, view, row, timeline.start, back)
    seen = (use > 0) & (out < most) & ((left >= 0) | (found >= 0))
    order = np.flatnonzero(seen)
    order = order[np.argsort(gone[order], kind="stable")]
    row, left, found = row[order], left[order], found[order]
    out, gone, back, use = (np.clip(column[order], 0, most) for column in (out, gone, back, use))
    return Moved(
        row=row,
        size=step.size[row],
        out=out,
        gone=gone,
        back=back,
        use=use,
        left=np.where(left >= 0, left, found),
        found=np.where(found >= 0, found, left),
        copied=np.tile(s.copied, len(first))[order].astype(np.int64),
    )


def _address(
    timeline: Timeline, view: View, row: NDArray[np.int64], edge: NDArray[np.int64], time: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the drawn address of each buffer's piece that ends, or begins, at a time; -1 without one."""
    most = int(timeline.end.max(initial=0)) + 1
    keys = timeline.owner * most + edge
    order = np.argsort(keys, kind="stable")
    inside = (time > 0) & (time < most)
    wanted = row * most + time
    at = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
    hit = inside & (keys[order][at] == wanted)
    return np.where(hit, view.address[order[at]], -1)

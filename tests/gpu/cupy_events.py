"""Allocations and frees by steps, to be replayed: random ones, those of a trace, and a recorded iteration.

Sizes are scaled so that the peak load is what may be alive at once.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import sequences
from sequences import Event

from traces import EventType
from traces.workload import generate

if TYPE_CHECKING:
    from collections.abc import Iterable

Steps = list[list[Event]]


def random_allocations(steps: int, events: int, most_bytes: int, seed: int = 0) -> Steps:
    """The pattern of RMM's benchmark RANDOM_ALLOCATIONS_BENCH, written anew from what it says of itself.

    Sizes are uniform from 1 to 4096 units. With a probability of 73 % there is one more buffer, else a random
    one goes; also where one more would be too much. There one unit is a MiB and 16 GiB are the most; here all
    is smaller by the same factor.

    Args:
        steps: into which the events are divided.
        events: of each step.
        most_bytes: that are alive at once.
        seed: of sizes and choices.
    """
    rng = random.Random(seed)
    unit = most_bytes // 16384
    live: list[tuple[int, int]] = []
    result = []
    for number in range(steps * events):
        size = unit * rng.randint(1, 4096)
        fits = sum(other for _, other in live) + size <= most_bytes
        if not live or (rng.random() < 0.73 and fits):
            live.append((number, size))
            result.append(Event(number, size))
        else:
            result.append(Event(live.pop(rng.randrange(len(live)))[0]))
    return [result[at : at + events] for at in range(0, len(result), events)]


def generated(steps: int, most_bytes: int, n_buffers: int = 2000, seed: int = 0) -> tuple[list[Event], Steps]:
    """What a synthetic trace allocates before its first iteration, and in each."""
    trace = generate(n_buffers, seed, iterations=steps)
    parts: Steps = [[]]
    for kind, buffer, size in zip(
        trace.kind.tolist(), trace.buffer.tolist(), trace.size.tolist(), strict=True
    ):
        if kind == EventType.MARK:
            parts.append([])
        elif kind in (EventType.ALLOC, EventType.FREE):
            parts[-1].append(Event(buffer, size))
    before, *each = fitted(parts, most_bytes)
    return before, each[:steps]


def recorded(name: str, steps: int, most_bytes: int) -> Steps:
    """A network's iteration as it was recorded, such as "gpt.train", again and again."""
    iteration = sequences.recorded(name)
    apart = len(iteration)
    each = [
        [
            event._replace(buffer=(number - event.age) * apart + event.buffer, age=0)
            for event in iteration
            if event.age <= number
        ]
        for number in range(steps)
    ]
    return fitted(each, most_bytes)


def peak_load(events: Iterable[Event]) -> int:
    """Most bytes alive at once."""
    sizes: dict[int, int] = {}
    load = peak = 0
    for event in events:
        if event.size:
            sizes[event.buffer] = event.size
        load += event.size or -sizes.pop(event.buffer)
        peak = max(peak, load)
    return peak


def fitted(steps: Steps, most_bytes: int) -> Steps:
    """The same with a peak load of at most so many bytes and nearly as much, as with another batch size."""
    factor = most_bytes / peak_load(event for step in steps for event in step)
    return [[event._replace(size=_scaled(event.size, factor)) for event in step] for step in steps]


def _scaled(size: int, factor: float) -> int:
    return max(int(size * factor) // 4 * 4, 4) if size else 0

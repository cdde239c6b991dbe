"""Recorded sequences of real programs, random differences from them, and a program that plays them.

An iteration is a list of events. The sequences lie in `tests/sequences`; `record.py` there says how they were
made.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from traces.formats.minimalloc import read_csv
from traces.trace import EventType, Trace

SEQUENCES = Path(__file__).resolve().parents[1] / "sequences"
OLDEST = 2  # iterations that a buffer outlives
NETWORKS = ("resnet", "unet", "seq2seq", "gpt", "bert", "llama")


class Event(NamedTuple):
    """An allocation or a free.

    Attributes:
        buffer: number of the buffer in the iteration.
        size: bytes; 0: a free.
        age: for a free, iterations since the allocation.
    """

    buffer: int
    size: int = 0
    age: int = 0


Iteration = list[Event]


def recorded(name: str) -> Iteration:
    """Return an iteration of a recorded sequence, such as "gpt.train"."""
    buffers = read_csv(SEQUENCES / f"{name}.csv")
    period = 2 * len(buffers)
    events: Iteration = [Event(-1)] * period
    for buffer, (start, end, size) in enumerate(zip(buffers.start, buffers.end, buffers.size, strict=True)):
        events[int(start)] = Event(buffer, int(size))
        events[int(end) % period] = Event(buffer, age=int(end) // period)
    assert all(event.buffer >= 0 and event.age <= OLDEST for event in events)
    return events


def allocations(iteration: Iterable[Event]) -> int:
    return sum(event.size > 0 for event in iteration)


# --- differences


class Diverged(NamedTuple):
    """An iteration that differs from the recorded one.

    Attributes:
        iteration: the events.
        place: index of the first event that differs.
        raises: the iteration ends by an exception, which frees its buffers.
    """

    iteration: Iteration
    place: int
    raises: bool = False


class Network(NamedTuple):
    """Iterations of one network: as usual, with fewer samples, and in evaluation."""

    train: Iteration
    fewer: Iteration
    evaluate: Iteration


def network(name: str) -> Network:
    return Network(*(recorded(f"{name}.{way}") for way in Network._fields))


def varied(name: str, most: int, iterations: int, *, marks: bool = False) -> Trace:
    """Return the trace of training on batches of random sizes, with a given highest peak.

    Args:
        name: name of the network.
        most: highest peak in bytes.
        iterations: number of iterations.
        marks: whether the trace has marks.
    """
    rng = random.Random(name)
    return scaled(name, most, [rng.uniform(0.2, 1) for _ in range(iterations)], marks=marks)


def scaled(name: str, most: int, batches: Sequence[float], *, marks: bool) -> Trace:
    """The same on batches of such parts of one that has so many bytes at its peak."""
    one = recorded(f"{name}.train")
    size_of = {event.buffer: event.size for event in one if event.size}
    load = np.cumsum([event.size or -size_of[event.buffer] for event in one])
    largest = most / (load.max() - min(load.min(), 0))
    rows: list[tuple[int, int, int]] = []
    alive: dict[tuple[int, int], int] = {}
    for number, batch in enumerate(batches):
        scale = largest * batch
        for event in one:
            if event.size:
                alive[number, event.buffer] = len(rows)
                rows.append((EventType.ALLOC, len(rows), max(1, int(event.size * scale))))
            elif (buffer := alive.pop((number - event.age, event.buffer), None)) is not None:
                rows.append((EventType.FREE, buffer, 0))
        rows.append((EventType.MARK, -1, 0))
    kind, buffer, size = np.array(rows, np.int64).T
    names = ("step" if marks else "the end",)
    return Trace.of(kind, buffer, size, names=names, operation=np.where(kind == EventType.MARK, 0, -1))


#: Numbers of buffers outside the recorded iterations.
_strangers = itertools.count(1 << 20)
FOR_GOOD = 1 << 40  # first number of buffers that stay at the end of an iteration


def _size(own: Network, rng: random.Random) -> int:
    """Draw a size: that of another buffer, or any."""
    sizes = [event.size for event in own.train if event.size]
    return rng.choice(sizes) if rng.random() < 0.5 else rng.randrange(600, max(sizes))


def _alloc_places(iteration: Iteration) -> list[int]:
    return [place for place, event in enumerate(iteration) if event.size]


def extra(own: Network, rng: random.Random) -> Diverged:
    """Add a buffer that is freed at once."""
    return _extras(own, rng, 1)


def many_extra(own: Network, rng: random.Random) -> Diverged:
    """Add a hundred buffers, one after another."""
    return _extras(own, rng, 100)


def _extras(own: Network, rng: random.Random, count: int) -> Diverged:
    place = rng.randrange(len(own.train))
    more: Iteration = []
    for _ in range(count):
        buffer = next(_strangers)
        more += [Event(buffer, _size(own, rng)), Event(buffer)]
    return Diverged([*own.train[:place], *more, *own.train[place:]], place)


def extra_until_the_end(own: Network, rng: random.Random) -> Diverged:
    """Add a buffer that is freed at the end of the iteration."""
    place, buffer = rng.randrange(len(own.train)), next(_strangers)
    more = Event(buffer, _size(own, rng))
    return Diverged([*own.train[:place], more, *own.train[place:], Event(buffer)], place)


def logged(own: Network, rng: random.Random) -> Diverged:
    """Add a buffer that is never freed."""
    place = rng.randrange(len(own.train))
    more = Event(FOR_GOOD + next(_strangers), _size(own, rng))
    return Diverged([*own.train[:place], more, *own.train[place:]], place)


def missing(own: Network, rng: random.Random) -> Diverged:
    """Remove a buffer."""
    place = rng.choice(_alloc_places(own.train))
    return Diverged(_without(own.train, {own.train[place].buffer}), place)


def _without(iteration: Iteration, gone: set[int]) -> Iteration:
    """Remove buffers; frees of earlier iterations' buffers stay."""
    return [event for event in iteration if event.buffer not in gone or event.age]


def stretch_left_out(own: Network, rng: random.Random) -> Diverged:
    """Remove a part, like a branch that is not taken."""
    place = rng.choice(_alloc_places(own.train))
    length = rng.randrange(4, 60)
    gone = {event.buffer for event in own.train[place : place + length] if event.size}
    return Diverged(_without(own.train, gone), place)


def stretch_repeated(own: Network, rng: random.Random) -> Diverged:
    """Repeat a part, like a loop of another length."""
    place = rng.choice(_alloc_places(own.train))
    stretch = own.train[place : place + rng.randrange(4, 60)]
    again = {event.buffer: next(_strangers) for event in stretch if event.size}
    more = [e._replace(buffer=again[e.buffer]) for e in stretch if e.buffer in again]
    gone = {e.buffer for e in more if not e.size}
    more += [Event(buffer) for buffer in again.values() if buffer not in gone]
    behind = place + len(stretch)
    return Diverged([*own.train[:behind], *more, *own.train[behind:]], behind)


def other_size(own: Network, rng: random.Random) -> Diverged:
    """Change the size of a buffer."""
    place = rng.choice(_alloc_places(own.train))
    changed = own.train[place]
    while changed == own.train[place]:
        changed = changed._replace(size=_size(own, rng))
    return Diverged([*own.train[:place], changed, *own.train[place + 1 :]], place)


def other_sizes_from_here(own: Network, rng: random.Random) -> Diverged:
    """Change all sizes from some event on, as after a shape that depends on the data."""
    place = rng.choice(_alloc_places(own.train))
    rest = [e._replace(size=-(-e.size * 3 // 4)) for e in own.train[place:]]
    return Diverged([*own.train[:place], *rest], place)


def swapped(own: Network, rng: random.Random) -> Diverged:
    """Swap two consecutive allocations."""
    places = _alloc_places(own.train)
    at = rng.randrange(len(places) - 1)
    first, second = places[at : at + 2]
    between = {event.buffer for event in own.train[first:second]}
    if own.train[first].buffer in [e.buffer for e in own.train[first + 1 : second]] or between == set():
        return swapped(own, rng)  # the first is freed before the second is allocated
    changed = list(own.train)
    changed[first], changed[second] = changed[second], changed[first]
    return Diverged(changed, first)


def freed_late(own: Network, rng: random.Random) -> Diverged:
    """Free a buffer later in the iteration, or in one of the next two."""
    place = rng.choice([p for p, e in enumerate(own.train) if not e.size])
    rest = [*own.train[:place], *own.train[place + 1 :]]
    if rng.random() < 0.5:
        rest.insert(rng.randrange(place, len(rest) + 1), own.train[place])
    return Diverged(rest, place)


def exception(own: Network, rng: random.Random) -> Diverged:
    """End the iteration early and free its buffers."""
    place = rng.randrange(1, len(own.train))
    return Diverged(own.train[:place], place, raises=True)


def evaluation(own: Network, rng: random.Random) -> Diverged:
    """Insert an evaluation."""
    place = rng.randrange(len(own.train))
    numbers = {event.buffer: next(_strangers) for event in own.evaluate}
    # Buffers that the recorded evaluation passes to its next iteration are freed at its end here.
    inner = [e._replace(buffer=numbers[e.buffer]) for e in own.evaluate if not e.age]
    made = [e.buffer for e in inner if e.size]
    gone = {e.buffer for e in inner if not e.size}
    inner += [Event(buffer) for buffer in made if buffer not in gone]
    return Diverged([*own.train[:place], *inner, *own.train[place:]], place)


def fewer_samples(own: Network, rng: random.Random) -> Diverged:
    """Replace the iteration by one with fewer samples, like the last batch of an epoch."""
    del rng
    return Diverged(own.fewer, 0)


DIVERGENCES: tuple[Callable[[Network, random.Random], Diverged], ...] = (
    extra,
    many_extra,
    extra_until_the_end,
    logged,
    missing,
    stretch_left_out,
    stretch_repeated,
    other_size,
    other_sizes_from_here,
    swapped,
    freed_late,
    exception,
    evaluation,
    fewer_samples,
)


# --- playing them


class Memory(Protocol):
    """An allocator."""

    def allocate(self, size: int) -> int:
        """Return an address."""

    def free(self, address: int) -> None:
        """Free a buffer."""


@dataclass
class Player:
    """A program that plays events, and ignores frees of buffers that it does not have.

    Attributes:
        memory: the allocator.
        live: address of each live buffer, by its iteration and its number in the iteration.
        number: number of the iteration.
    """

    memory: Memory
    live: dict[tuple[int, int], int] = field(default_factory=dict)
    number: int = 0

    def play(self, iteration: Iteration, *, raises: bool = False) -> None:
        """Play one iteration."""
        for event in iteration:
            self.do(event)
        self.end(raises=raises)

    def do(self, event: Event) -> None:
        if event.size:
            self.live[self.number, event.buffer] = self.memory.allocate(event.size)
        elif (address := self.live.pop((self.number - event.age, event.buffer), None)) is not None:
            self.memory.free(address)

    def end(self, *, raises: bool = False) -> None:
        """Free buffers of old iterations, or after an exception all of this iteration; kept buffers stay."""
        for number, buffer in list(self.live):
            age = self.number - number
            if buffer < FOR_GOOD and (age > OLDEST or (raises and age == 0)):
                self.memory.free(self.live.pop((number, buffer)))
        self.number += 1

    def free_all(self) -> None:
        for address in self.live.values():
            self.memory.free(address)
        self.live.clear()

"""Recorded sequences of real programs, what goes otherwise in them, and a program that plays them.

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
    """A buffer comes or goes.

    Attributes:
        buffer: its number in the iteration.
        size: bytes; 0: it goes.
        age: of a buffer that goes: iterations since it came.
    """

    buffer: int
    size: int = 0
    age: int = 0


Iteration = list[Event]


def recorded(name: str) -> Iteration:
    """An iteration of the circle that was recorded, such as "gpt.train"."""
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


# --- what goes otherwise


class Diverged(NamedTuple):
    """An iteration that goes otherwise.

    Attributes:
        iteration: what happens in it.
        place: the first event that is not as always.
        raises: it ends by an exception, and what it made goes.
    """

    iteration: Iteration
    place: int
    raises: bool = False


class Network(NamedTuple):
    """One network's iterations: as always, on fewer samples, in evaluation."""

    train: Iteration
    fewer: Iteration
    evaluate: Iteration


def network(name: str) -> Network:
    return Network(*(recorded(f"{name}.{way}") for way in Network._fields))


def varied(name: str, most: int, iterations: int, *, marks: bool = False) -> Trace:
    """Training of a recorded network on batches of random sizes, with so many bytes at the highest peak.

    Args:
        name: of the network.
        most: bytes.
        iterations: how many.
        marks: the pool is told where they end.
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


#: Numbers for buffers that no recorded iteration has.
_strangers = itertools.count(1 << 20)
FOR_GOOD = 1 << 40  # and for those that nobody frees at the iteration's end


def _size(own: Network, rng: random.Random) -> int:
    """One that the program might ask for: of another buffer, or any."""
    sizes = [event.size for event in own.train if event.size]
    return rng.choice(sizes) if rng.random() < 0.5 else rng.randrange(600, max(sizes))


def _alloc_places(iteration: Iteration) -> list[int]:
    return [place for place, event in enumerate(iteration) if event.size]


def extra(own: Network, rng: random.Random) -> Diverged:
    """One more buffer, which goes at once."""
    return _extras(own, rng, 1)


def many_extra(own: Network, rng: random.Random) -> Diverged:
    """A hundred more, one after another."""
    return _extras(own, rng, 100)


def _extras(own: Network, rng: random.Random, count: int) -> Diverged:
    place = rng.randrange(len(own.train))
    more: Iteration = []
    for _ in range(count):
        buffer = next(_strangers)
        more += [Event(buffer, _size(own, rng)), Event(buffer)]
    return Diverged([*own.train[:place], *more, *own.train[place:]], place)


def extra_until_the_end(own: Network, rng: random.Random) -> Diverged:
    """One more, which goes when the iteration ends."""
    place, buffer = rng.randrange(len(own.train)), next(_strangers)
    more = Event(buffer, _size(own, rng))
    return Diverged([*own.train[:place], more, *own.train[place:], Event(buffer)], place)


def logged(own: Network, rng: random.Random) -> Diverged:
    """One more, which is kept for good."""
    place = rng.randrange(len(own.train))
    more = Event(FOR_GOOD + next(_strangers), _size(own, rng))
    return Diverged([*own.train[:place], more, *own.train[place:]], place)


def missing(own: Network, rng: random.Random) -> Diverged:
    """One less."""
    place = rng.choice(_alloc_places(own.train))
    return Diverged(_without(own.train, {own.train[place].buffer}), place)


def _without(iteration: Iteration, gone: set[int]) -> Iteration:
    """Without these buffers; those of earlier iterations go as always."""
    return [event for event in iteration if event.buffer not in gone or event.age]


def stretch_left_out(own: Network, rng: random.Random) -> Diverged:
    """A part that is not run, as a branch that is not taken."""
    place = rng.choice(_alloc_places(own.train))
    length = rng.randrange(4, 60)
    gone = {event.buffer for event in own.train[place : place + length] if event.size}
    return Diverged(_without(own.train, gone), place)


def stretch_repeated(own: Network, rng: random.Random) -> Diverged:
    """A part that is run twice, as a loop of another length."""
    place = rng.choice(_alloc_places(own.train))
    stretch = own.train[place : place + rng.randrange(4, 60)]
    again = {event.buffer: next(_strangers) for event in stretch if event.size}
    more = [e._replace(buffer=again[e.buffer]) for e in stretch if e.buffer in again]
    gone = {e.buffer for e in more if not e.size}
    more += [Event(buffer) for buffer in again.values() if buffer not in gone]
    behind = place + len(stretch)
    return Diverged([*own.train[:behind], *more, *own.train[behind:]], behind)


def other_size(own: Network, rng: random.Random) -> Diverged:
    """One of another size."""
    place = rng.choice(_alloc_places(own.train))
    changed = own.train[place]
    while changed == own.train[place]:
        changed = changed._replace(size=_size(own, rng))
    return Diverged([*own.train[:place], changed, *own.train[place + 1 :]], place)


def other_sizes_from_here(own: Network, rng: random.Random) -> Diverged:
    """From somewhere on all have other sizes, as after a shape that depends on the data."""
    place = rng.choice(_alloc_places(own.train))
    rest = [e._replace(size=-(-e.size * 3 // 4)) for e in own.train[place:]]
    return Diverged([*own.train[:place], *rest], place)


def swapped(own: Network, rng: random.Random) -> Diverged:
    """Two that follow each other come in the other order."""
    places = _alloc_places(own.train)
    at = rng.randrange(len(places) - 1)
    first, second = places[at : at + 2]
    between = {event.buffer for event in own.train[first:second]}
    if own.train[first].buffer in [e.buffer for e in own.train[first + 1 : second]] or between == set():
        return swapped(own, rng)  # the first has gone before the second comes
    changed = list(own.train)
    changed[first], changed[second] = changed[second], changed[first]
    return Diverged(changed, first)


def freed_late(own: Network, rng: random.Random) -> Diverged:
    """One stays longer: until later in the iteration, or in one of the next two."""
    place = rng.choice([p for p, e in enumerate(own.train) if not e.size])
    rest = [*own.train[:place], *own.train[place + 1 :]]
    if rng.random() < 0.5:
        rest.insert(rng.randrange(place, len(rest) + 1), own.train[place])
    return Diverged(rest, place)


def exception(own: Network, rng: random.Random) -> Diverged:
    """The iteration ends half-way, and what it made goes."""
    place = rng.randrange(1, len(own.train))
    return Diverged(own.train[:place], place, raises=True)


def evaluation(own: Network, rng: random.Random) -> Diverged:
    """An evaluation in the middle."""
    place = rng.randrange(len(own.train))
    numbers = {event.buffer: next(_strangers) for event in own.evaluate}
    # What the recorded evaluation hands on from one iteration to the next goes with it here.
    inner = [e._replace(buffer=numbers[e.buffer]) for e in own.evaluate if not e.age]
    made = [e.buffer for e in inner if e.size]
    gone = {e.buffer for e in inner if not e.size}
    inner += [Event(buffer) for buffer in made if buffer not in gone]
    return Diverged([*own.train[:place], *inner, *own.train[place:]], place)


def fewer_samples(own: Network, rng: random.Random) -> Diverged:
    """Another iteration altogether: the last batch of an epoch."""
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
    """What serves a program."""

    def allocate(self, size: int) -> int:
        """An address."""

    def free(self, address: int) -> None:
        """The buffer goes."""


@dataclass
class Player:
    """A program that allocates as it is told, and frees whatever it is told to that it has.

    Attributes:
        memory: what serves it.
        live: addresses by the iteration that made the buffer and its number there.
        number: of the iteration.
    """

    memory: Memory
    live: dict[tuple[int, int], int] = field(default_factory=dict)
    number: int = 0

    def play(self, iteration: Iteration, *, raises: bool = False) -> None:
        """One iteration."""
        for event in iteration:
            self.do(event)
        self.end(raises=raises)

    def do(self, event: Event) -> None:
        if event.size:
            self.live[self.number, event.buffer] = self.memory.allocate(event.size)
        elif (address := self.live.pop((self.number - event.age, event.buffer), None)) is not None:
            self.memory.free(address)

    def end(self, *, raises: bool = False) -> None:
        """What has long outlived its iteration goes, after an exception all it made; not what is kept."""
        for number, buffer in list(self.live):
            age = self.number - number
            if buffer < FOR_GOOD and (age > OLDEST or (raises and age == 0)):
                self.memory.free(self.live.pop((number, buffer)))
        self.number += 1

    def free_all(self) -> None:
        for address in self.live.values():
            self.memory.free(address)
        self.live.clear()

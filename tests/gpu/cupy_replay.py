"""Plays allocations and frees over an array module; what comes out tells whether buffers overlapped."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sequences import Event


class Replay:
    """Plays what is allocated and freed, and looks through each buffer before it goes.

    Each is filled whole with its number when it comes. What lies in a thousand places of it is added up when
    it goes, in place: nothing is allocated for that.
    """

    PLACES = 1024

    def __init__(self, xp: Any, before: list[Event], steps: list[list[Event]]) -> None:
        """Nothing is allocated yet.

        Args:
            xp: the array module.
            before: events of the first step alone, ahead of its own.
            steps: of each step.
        """
        self._xp, self._before, self._steps = xp, before, steps
        self._live: dict[int, Any] = {}
        self._seen = xp.zeros(self.PLACES, xp.uint64)

    def step(self, number: int) -> None:
        """Play the next iteration."""
        for event in [*(self._before if number == 0 else ()), *self._steps[number]]:
            if event.size:
                self._live[event.buffer] = self._made(event)
            else:
                self._look(self._live.pop(event.buffer))

    def result(self) -> str:
        """Of what was seen in all buffers, those alive included."""
        for number in list(self._live):
            self._look(self._live.pop(number))
        return hash_of(bytes_of(self._seen))

    def _made(self, event: Event) -> Any:
        buffer = self._xp.empty(event.size, self._xp.uint8)
        buffer.fill(event.buffer % 251)
        return buffer

    def _look(self, buffer: Any) -> None:
        places = buffer[:: max(1, len(buffer) // self.PLACES)][: self.PLACES]
        self._seen *= 31
        seen = self._seen[: len(places)]
        seen += places


def bytes_of(array: Any) -> bytes:
    """An array's values, wherever it is."""
    on_host = array.get() if hasattr(array, "get") else array
    values: bytes = on_host.tobytes()
    return values


def hash_of(*parts: bytes) -> str:
    """Sixteen digits that tell results apart."""
    result = hashlib.sha256()
    for part in parts:
        result.update(part)
    return result.hexdigest()[:16]

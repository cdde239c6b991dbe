"""Whether it helps that the program marks its iterations: where kinds of them take turns, it may hinder.

With marks each kind of iteration has a plan of its own, made as if it followed itself. What is still alive
when the next kind begins, gradients and the last outputs, may lie where that one's plan has something else.
Where they come in an order that repeats, as batches of two lengths in turn do, one plan of the whole turn has
no such misses, and that is what the pool finds where nothing is marked. So where much misses for that reason
the marks go unheard for a while, and for good if that is better.
"""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING

from mempool.report import NewOutcomes, missed

if TYPE_CHECKING:
    from mempool import _core
    from mempool.planner import Planner

log = logging.getLogger("mempool")

#: From one look to the next, in marks.
MARKS_BETWEEN_LOOKS = 32
#: So many looks in a row must show that marks hinder.
LOOKS = 3
#: Within so many looks it must be better without them: until the first plan nothing hits.
MOST_LOOKS = 6
#: A smaller share of misses is not worth learning everything anew.
LEAST_MISSES = 0.01
#: With a plan from a file that was made without them, more than this share of misses has them heard again.
MOST_MISSES = 0.1


class _State(enum.Enum):
    HEARD = enum.auto()
    TRYING = enum.auto()
    UNHEARD = enum.auto()
    FOR_GOOD = enum.auto()  # heard, whatever comes


class Marks:
    """Looks at one client's misses as its program marks iterations."""

    def __init__(self, client: _core.Client, planner: Planner) -> None:
        """They are heard."""
        self._client, self._planner = client, planner
        self._state = _State.HEARD
        self._marks = self._looks = 0
        self._before = 1.0  # share of misses while they were heard
        self._new = NewOutcomes()

    @property
    def are_heard(self) -> bool:
        """Whether they begin iterations now."""
        return self._state in (_State.HEARD, _State.FOR_GOOD)

    def go_unheard(self) -> None:
        """A plan that was made so is about to be followed."""
        self._state, self._before = _State.UNHEARD, MOST_MISSES
        self._client.hear_marks(hear=False)

    def came(self) -> None:
        """A step, or the end of an iteration, was marked."""
        self._marks += 1
        if self._marks % MARKS_BETWEEN_LOOKS == 0 and self._state is not _State.FOR_GOOD:
            self._look()

    def _look(self) -> None:
        misses, occupied = self._shares()
        match self._state:
            case _State.HEARD:
                hinders = misses >= LEAST_MISSES and 2 * occupied >= misses
                self._looks = self._looks + 1 if hinders and self._planner.known > 1 else 0
                if self._looks == LOOKS:
                    self._before = misses
                    self._hear(_State.TRYING)
            case _State.TRYING:
                self._looks += 1
                if 2 * misses <= self._before:
                    self._state, self._looks = _State.UNHEARD, 0
                elif self._looks == MOST_LOOKS:
                    self._hear(_State.FOR_GOOD)
            case _State.UNHEARD:
                self._looks = self._looks + 1 if misses > self._before else 0
                if self._looks == MOST_LOOKS:
                    self._hear(_State.FOR_GOOD)

    def _hear(self, state: _State) -> None:
        heard = state is not _State.TRYING
        log.info("marks of iterations are %s", "heard again" if heard else "not heard, to see whether they hinder")
        self._state, self._looks = state, 0
        self._client.hear_marks(hear=heard)
        self._planner.begin_anew()

    def _shares(self) -> tuple[float, float]:
        """Of what could have hit since the last look: what missed, and for something that was alive there."""
        new = self._new.of(self._client.stats()["outcomes"])
        misses = missed(new)
        asked = max(new["hit"] + misses, 1)
        return misses / asked, new["occupied"] / asked

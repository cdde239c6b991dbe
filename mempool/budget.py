"""How much of the processor's time may go to something that runs beside the program."""

from __future__ import annotations

import resource
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


#: Seconds that the program loses each time that a thread beside it waits for the interpreter's lock; measured
#: with a test suite of statsmodels on two cores of a virtual machine, of whose processor time the planner's
#: 8,000 waits took 0.6 s.
HANDOVER_SECONDS = 80e-6


def cost_of_thread() -> float:
    """Seconds that the calling thread has cost the process, by its work and by taking turns."""
    return time.thread_time() + HANDOVER_SECONDS * resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class Budget:
    """Seconds of processor time to spend: some at once, then a share of the time that passes.

    What is begun is finished, so a budget can be overdrawn; how far that counts is bounded, lest one long
    solve forbid the next look for minutes.
    """

    def __init__(
        self,
        *,
        allowance: float,
        share: float,
        most_debt: float,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = cost_of_thread,
    ) -> None:
        """Begin with all of the allowance.

        Args:
            allowance: seconds that can be spent at once; what is not spent does not grow beyond them.
            share: of the time that passes.
            most_debt: seconds.
            clock: what passes, in seconds.
            spent: what the calling thread has cost so far, in seconds.
        """
        self._allowance, self._share, self._most_debt = allowance, share, most_debt
        self._clock, self._spent = clock, spent
        self._left, self._then = allowance, clock()

    def has_some(self) -> bool:
        """Whether something may be spent now."""
        return self.left() > 0

    def left(self) -> float:
        """Seconds that may be spent now; less than nothing is a debt."""
        now = self._clock()
        self._left = min(self._allowance, self._left + self._share * (now - self._then))
        self._then = now
        return self._left

    def charge(self, seconds: float) -> None:
        """So much was spent."""
        self._left = max(-self._most_debt, self._left - seconds)

    @contextmanager
    def charged(self) -> Iterator[Callable[[], None]]:
        """Spend what the calling thread takes inside, unless it calls what is yielded: it was worth it."""
        before, charge = self._spent(), True

        def forgive() -> None:
            nonlocal charge
            charge = False

        try:
            yield forgive
        finally:
            if charge:
                self.charge(self._spent() - before)

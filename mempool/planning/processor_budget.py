"""Budget of processor time for work that runs beside the program."""

from __future__ import annotations

import resource
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


#: Seconds that the program loses whenever a thread beside the program waits for the interpreter's lock;
#: measured with a test suite of statsmodels on two cores of a virtual machine, where the planner's 8,000
#: waits took 0.6 s of the program's processor time.
HANDOVER_SECONDS = 80e-6


def cost_of_thread() -> float:
    """Return the seconds that the calling thread has cost the process, by work and by lock handovers."""
    return time.thread_time() + HANDOVER_SECONDS * resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class Budget:
    """Budget of processor time in seconds: an allowance at once, then a share of the elapsed time.

    Begun work is finished, so a budget can be overdrawn; the debt is bounded, lest one long solve forbid the
    next look for minutes.
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
        """Start with the full allowance.

        Args:
            allowance: seconds that can be spent at once; savings do not grow beyond the allowance.
            share: share of the elapsed time that is added.
            most_debt: largest debt, in seconds.
            clock: returns the elapsed time in seconds.
            spent: returns the cost of the calling thread so far, in seconds.
        """
        self._allowance, self._share, self._most_debt = allowance, share, most_debt
        self._clock, self._spent = clock, spent
        self._left, self._then = allowance, clock()

    def has_some(self) -> bool:
        """Return true if some budget is left."""
        return self.left() > 0

    def left(self) -> float:
        """Return the seconds that may be spent now; negative for a debt."""
        now = self._clock()
        self._left = min(self._allowance, self._left + self._share * (now - self._then))
        self._then = now
        return self._left

    def charge(self, seconds: float) -> None:
        """Charge `seconds` to the budget."""
        self._left = max(-self._most_debt, self._left - seconds)

    @contextmanager
    def charged(self) -> Iterator[Callable[[], None]]:
        """Charge the calling thread's cost inside the context, unless the yielded function is called."""
        before, charge = self._spent(), True

        def forgive() -> None:
            nonlocal charge
            charge = False

        try:
            yield forgive
        finally:
            if charge:
                self.charge(self._spent() - before)

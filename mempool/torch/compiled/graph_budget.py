"""The graphs of one call of `torch.compile`, which share a limit."""

from __future__ import annotations

import atexit
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mempool.torch.compiled.external_memory import NOTHING, Beside
from mempool.torch.compiled.runtime_observer import Looks
from solvers.rewriting.distance_rule import matching_operations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mempool.torch.compiled.decision import Decided
    from mempool.torch.compiled.options import Options
    from mempool.torch.compiled.step_timing import Clock


#: Bytes of tickets in flight, for each value that may be offloaded.
TICKET_BYTES = 16
#: Tolerance of the search for the least limit that the graphs of a function can hold together, as a share of
#: that limit.
_CLOSE = 0.01


@dataclass(frozen=True, eq=False)
class Part:
    """One compiled graph.

    Attributes:
        number: grows in the order in which the graphs of a step first ran.
        more: true if the function continues in another graph, as after a graph break.
        options: the options of the backend.
        decided: the decision about the graph.
        clock: the times of the two graphs.
        beside: the memory assumed to be in use outside the graph.
        host_end: end of the planned places of the graph's copies, in bytes from the start of the host arena.
        kept_before: bytes that earlier graphs were predicted to keep when this graph was compiled.
        keeps: returns the bytes that the graph would keep between the passes within another limit; None: as
            many as now, e.g. when the function's last graph, or another function, has been compiled.
    """

    number: int
    more: bool
    options: Options
    decided: Decided
    clock: Clock
    beside: Beside = NOTHING
    host_end: int = 0
    kept_before: int = 0
    keeps: Callable[[int], int] | None = None

    def kept_within(self, limit: int, beside: int) -> int:
        """Return the bytes kept between the passes within another limit.

        Earlier graphs keep `beside` bytes in that case.
        """
        if self.keeps is None:
            return self.decided.kept_bytes
        return self.keeps(limit + self.kept_before - beside)


@dataclass(eq=False)
class Budget:
    """The graphs compiled for one call of `torch.compile`.

    Attributes:
        asked: the options object of the call, which identifies the call.
        parts: by graph number, the latest compilation.
        met: name filters that matched anything so far.
        looks: the observer of the graphs' runs.
    """

    asked: Any
    parts: dict[int, Part] = field(default_factory=dict)
    met: set[str] = field(default_factory=set)
    looks: Looks = field(default_factory=Looks)

    def kept_before(self, number: int) -> int:
        """Return the bytes that earlier graphs are predicted to keep while a graph runs, if each ran once."""
        return sum(part.decided.kept_bytes for part in self._before(number))

    def kept_within(self, number: int, limit: int) -> int:
        """Return the bytes that earlier graphs would keep within another limit."""
        kept = 0
        for part in self._before(number):
            kept += part.kept_within(limit, kept)
        return kept

    def tickets_before(self, number: int) -> int:
        """Return the most bytes of tickets that earlier graphs hold."""
        movable = (part.decided.captured.graph.movable.sum() for part in self._before(number))
        return TICKET_BYTES * int(sum(movable))

    def enough(self, number: int, limit: int, least: int) -> int:
        """Return a feasible limit for a graph: the lowest one, or slightly more.

        Args:
            number: the number of the graph.
            limit: an infeasible limit.
            least: a limit that is feasible with the bytes that earlier graphs keep now.
        """
        own = least - self.kept_before(number)

        def holds(limit: int) -> bool:
            return own + self.kept_within(number, limit) <= limit

        fewest = own + self.kept_within(number, least)
        if fewest >= least or (fewest > limit and holds(fewest)):
            return min(fewest, least)
        low, high = max(fewest, limit), least
        while high - low > max(least * _CLOSE, 1):
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle, high)
        return high

    def forget(self) -> None:
        """Drop the functions for the bytes kept within other limits, which are not needed any more."""
        self.parts.update({number: replace(one, keeps=None) for number, one in self.parts.items()})

    def _before(self, number: int) -> list[Part]:
        """Return the earlier graphs in order."""
        return [part for one, part in sorted(self.parts.items()) if one < number]

    def host_before(self, number: int) -> int:
        """Return the start of a graph's copies in the host arena: the end of the copies of earlier graphs."""
        return max((part.host_end for part in self._before(number)), default=0)

    def add(self, part: Part) -> None:
        """Add a graph; after a function's last graph, warn once of name filters without any match."""
        self.parts[part.number] = part
        if not part.more:
            self.forget()
        graph, options = part.decided.captured.graph, part.options
        patterns = {*options.include, *options.exclude} - self.met
        self.met |= {one for one in patterns if matching_operations(graph, [one]).any()}
        if not part.more and (strange := sorted(patterns - self.met)):
            self.met |= patterns
            names = [*graph.kinds[:3], *[one for one in graph.modules if one][:3]]
            warnings.warn(
                f"no operation or module is named {', '.join(map(repr, strange))} by include or exclude; "
                f"there are such as {', '.join(map(repr, names))}",
                stacklevel=2,
            )


def warn_of_more(most: int, limit: int | None) -> None:
    """Warn of a peak above the limit if only one budget is in use; otherwise others may use the memory."""
    if sum(bool(budget.parts) and budget.looks.present.is_used for budget in BUDGETS) == 1:
        warnings.warn(
            f"{most} bytes are on the device, more than the limit of {limit}, though graphs hold it: what is "
            "not compiled takes the rest, or lies beside; PyTorch compiles nothing of a function that stops "
            "in the middle of a loop, unless what it calls there is compiled by itself",
            stacklevel=2,
        )


#: The latest budgets, in the order of their first use.
BUDGETS: list[Budget] = []
atexit.register(BUDGETS.clear)  # objects made by native code are freed before that code is unloaded
_MOST = 64


def budget_of(options: Mapping[str, Any] | None) -> Budget:
    """Return the budget of a call, identified by the options object that each compilation passes."""
    for budget in BUDGETS:
        if budget.asked is options:
            return budget
    for budget in BUDGETS:
        budget.forget()
    BUDGETS.append(Budget(options))
    del BUDGETS[:-_MOST]
    return BUDGETS[-1]

"""The graphs of one call of `torch.compile`, which share its limit."""

from __future__ import annotations

import atexit
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mempool.torch.rewriting.looks import Looks
from mempool.torch.rewriting.present import NOTHING, Beside
from solvers.rewriting.rules import matching

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mempool.torch.rewriting.clock import Clock
    from mempool.torch.rewriting.decided import Decided
    from mempool.torch.rewriting.options import Options


#: Bytes of tickets on the way, for each value that may leave.
TICKET_BYTES = 16
#: As close to the least limit that graphs of one function can hold together, a share of it, is close enough.
_CLOSE = 0.01


@dataclass(frozen=True, eq=False)
class Part:
    """One graph.

    Attributes:
        number: growing in the order in which those of one step first ran.
        more: whether the graph breaks off, so that the function goes on in another.
        options: what was asked for.
        decided: what became of it.
        clock: how long its two graphs take.
        beside: what was counted of what is beside it.
        host_end: bytes from the begin of the host's arena to the end of where its copies are planned to lie.
        kept_before: what graphs before it were thought to keep when it was compiled.
        keeps: what it would keep between its passes within another limit, as far as is known; None: no more
            than it does is, as when the function's last graph has been compiled, or another function.
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
        """Bytes between its passes within another limit, with so much there of the graphs before it."""
        if self.keeps is None:
            return self.decided.kept_bytes
        return self.keeps(limit + self.kept_before - beside)


@dataclass(eq=False)
class Budget:
    """What one call of `torch.compile` has compiled.

    Attributes:
        asked: the options as they were given, which tell calls from each other.
        parts: the graphs by their numbers, of each number the last one.
        met: patterns of which something was met.
        looks: at their runs.
    """

    asked: Any
    parts: dict[int, Part] = field(default_factory=dict)
    met: set[str] = field(default_factory=set)
    looks: Looks = field(default_factory=Looks)

    def kept_before(self, number: int) -> int:
        """Bytes that the graphs before this one are thought to keep while it runs, if each ran once."""
        return sum(part.decided.kept_bytes for part in self._before(number))

    def kept_within(self, number: int, limit: int) -> int:
        """The same, had another limit been asked for."""
        kept = 0
        for part in self._before(number):
            kept += part.kept_within(limit, kept)
        return kept

    def tickets_before(self, number: int) -> int:
        """Bytes of tickets that graphs before this one hold at most."""
        movable = (part.decided.captured.graph.movable.sum() for part in self._before(number))
        return TICKET_BYTES * int(sum(movable))

    def enough(self, number: int, limit: int, least: int) -> int:
        """A limit that a graph can hold: the lowest, or somewhat more.

        Args:
            number: of the graph.
            limit: it cannot hold this one.
            least: it could hold this one beside what graphs before it keep within that one.
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
        """What would be kept within other limits: nobody asks any more."""
        self.parts.update({number: replace(one, keeps=None) for number, one in self.parts.items()})

    def _before(self, number: int) -> list[Part]:
        """The graphs before one, in their order."""
        return [part for one, part in sorted(self.parts.items()) if one < number]

    def host_before(self, number: int) -> int:
        """Where in the host's arena copies of a graph begin: behind those of graphs before it."""
        return max((part.host_end for part in self._before(number)), default=0)

    def add(self, part: Part) -> None:
        """One more graph; when it is a function's last, patterns that name nothing at all are told once."""
        self.parts[part.number] = part
        if not part.more:
            self.forget()
        graph, options = part.decided.captured.graph, part.options
        patterns = {*options.include, *options.exclude} - self.met
        self.met |= {one for one in patterns if matching(graph, [one]).any()}
        if not part.more and (strange := sorted(patterns - self.met)):
            self.met |= patterns
            names = [*graph.kinds[:3], *[one for one in graph.modules if one][:3]]
            warnings.warn(
                f"no operation or module is named {', '.join(map(repr, strange))} by include or exclude; "
                f"there are such as {', '.join(map(repr, names))}",
                stacklevel=2,
            )


def warn_of_more(most: int, limit: int | None) -> None:
    """Say that there was more than a limit, where there is only one: else others take their own."""
    if sum(bool(budget.parts) and budget.looks.present.is_used for budget in BUDGETS) == 1:
        warnings.warn(
            f"{most} bytes are on the device, more than the limit of {limit}, though graphs hold it: what is "
            "not compiled takes the rest, or lies beside; PyTorch compiles nothing of a function that stops "
            "in the middle of a loop, unless what it calls there is compiled by itself",
            stacklevel=2,
        )


#: The last ones, in the order in which they were first met.
BUDGETS: list[Budget] = []
atexit.register(BUDGETS.clear)  # what native code made goes before it does
_MOST = 64


def budget_of(options: Mapping[str, Any] | None) -> Budget:
    """The budget of a call, which passes the same options each time."""
    for budget in BUDGETS:
        if budget.asked is options:
            return budget
    for budget in BUDGETS:
        budget.forget()
    BUDGETS.append(Budget(options))
    del BUDGETS[:-_MOST]
    return BUDGETS[-1]

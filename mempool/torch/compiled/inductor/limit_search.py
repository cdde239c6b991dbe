"""Search the limit to ask for in terms of operations, so that the fused kernels hold the real limit."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Told = TypeVar("Told")

#: Largest reduction of the asked limit, as a share of the limit, at which the compiler's own kernels are
#: tried again: the same kernels may well hold a limit that is so little exceeded.
_SLIGHT = 0.04
#: Unused share of a limit, and lost share of a step's time, up to which asking for more bytes is not
#: worthwhile.
_NEAR, _LOSS = 0.05, 0.02
#: Most attempts with a lower limit, and with a higher one.
_DOWN, _UP = 4, 2


class Extreme(enum.Enum):
    """Decisions that can be requested independent of the limit."""

    NOTHING = enum.auto()  # no moves, except those needed to keep few bytes
    LEAST = enum.auto()  # the lowest peak, counted by operations
    ALL = enum.auto()  # all values move


Asked = int | Extreme


@dataclass(frozen=True)
class Look(Generic[Told]):
    """The outcome of asking for one limit.

    Attributes:
        peak_bytes: lower bound on the peak of the kernels; exact if within the limit.
        asked_bytes: peak of the operations, at most the limit asked for.
        loss: additional time of the step compared with no limit, as a share.
        told: further information.
    """

    peak_bytes: int
    asked_bytes: int
    loss: float
    told: Told


def ask(limit: int, least: int, look: Callable[..., Look[Told]]) -> tuple[Look[Told], bool]:
    """Return the outcome that holds a limit with little loss or has the lowest peak, and if the limit holds.

    Kernels of the compiler's choice are tried first. If they exceed the limit by much, small kernels follow:
    a kernel that reads little keeps little memory waiting. Last come the extremes, which depend on no
    measurement: the error names their lowest peak, and that number is reached again when given as the limit.

    Args:
        limit: bytes.
        least: the lowest limit that may be asked for; may exceed `limit`.
        look: asks for a limit or an extreme, with kernels that are ``small`` or not.
    """
    asked = max(limit, least)
    found = look(asked, small=False)
    if found.peak_bytes <= limit:
        return _more(limit, asked, None, found, partial(look, small=False)), True
    below = found.asked_bytes - (found.peak_bytes - limit)
    if least <= below and limit - below <= _SLIGHT * limit:
        found = look(below, small=False)
        if found.peak_bytes <= limit:
            return found, True
    above: int | None = None
    for times in range(_DOWN):
        found = look(asked, small=True)
        if found.peak_bytes <= limit:
            return _more(limit, asked, above, found, partial(look, small=True)), True
        if asked == least:
            break
        above = asked
        asked = found.asked_bytes - (1 + times) * (found.peak_bytes - limit)
        if times + 2 == _DOWN or asked < least:
            asked = least
    last = []
    for extreme, small in product(Extreme, (False, True)):
        last.append(look(extreme, small=small))
        if last[-1].peak_bytes <= limit:
            return last[-1], True
    return min(last, key=lambda one: one.peak_bytes), False


def _more(
    limit: int, asked: int, above: int | None, found: Look[Told], look: Callable[[int], Look[Told]]
) -> Look[Told]:
    """Improve an outcome by asking for more bytes, but for fewer than `above`, which was too much."""
    for _ in range(_UP):
        room = limit - found.peak_bytes
        if room <= _NEAR * limit or found.loss <= _LOSS:
            break
        more = asked + room if above is None else min(asked + room, (asked + above) // 2)
        other = look(more)
        if other.peak_bytes > limit:
            break
        found, asked = other, more
    return found

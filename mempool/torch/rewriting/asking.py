"""For which limit to ask for decisions about operations, so that kernels made of them hold another."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Told = TypeVar("Told")

#: So little above a limit, a share of it, that the same kernels may well hold it for a little less.
_SLIGHT = 0.04
#: As little left of a limit, or as little lost of a step's time, that it is not worth while to ask for more.
_NEAR, _LOSS = 0.05, 0.02
#: How often to ask for less, and for more.
_DOWN, _UP = 4, 2


class Extreme(enum.Enum):
    """What can be asked for whatever the limit is."""

    NOTHING = enum.auto()  # moves, but what must where little is to be kept
    LEAST = enum.auto()  # is needed, by operations
    ALL = enum.auto()  # moves


Asked = int | Extreme


@dataclass(frozen=True)
class Look(Generic[Told]):
    """What came of asking for a limit.

    Attributes:
        peak_bytes: of the kernels, at least; all of it where that is within the limit.
        asked_bytes: of the operations, which is at most what was asked for.
        loss: how much longer the step takes than without a limit, as a share.
        told: anything more.
    """

    peak_bytes: int
    asked_bytes: int
    loss: float
    told: Told


def ask(limit: int, least: int, look: Callable[..., Look[Told]]) -> tuple[Look[Told], bool]:
    """What holds a limit with little loss, or else what needs least; and whether it holds.

    First kernels are as the compiler likes them; where these need much more than the limit, they are small:
    what reads little keeps little waiting. At last the extremes are looked at, which depend on nothing that
    is measured: the least that they need is told, and found again when it is the limit.

    Args:
        limit: bytes.
        least: the lowest limit that may be asked for; the one that holds may be more than `limit`.
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
    """What was found, or better for more bytes, but for fewer than was too many."""
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

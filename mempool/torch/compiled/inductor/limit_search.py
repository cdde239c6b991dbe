"""Search the limit to request in terms of operations, so that the fused kernels hold the real limit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Generic, TypeVar

from mempool.torch.compiled.options import TUNABLES
from mempool.torch.compiled.records import Extreme

if TYPE_CHECKING:
    from collections.abc import Callable

Outcome = TypeVar("Outcome")


Request = int | Extreme


@dataclass(frozen=True)
class Trial(Generic[Outcome]):
    """The outcome of asking for one limit.

    Attributes:
        peak_bytes: lower bound on the peak of the kernels; exact if within the limit.
        operation_bytes: peak of the operations, at most the requested limit.
        loss: additional time of the step compared with no limit, as a share.
        outcome: further information.
    """

    peak_bytes: int
    operation_bytes: int
    loss: float
    outcome: Outcome


def search_limit(
    limit: int, least: int, try_limit: Callable[..., Trial[Outcome]]
) -> tuple[Trial[Outcome], bool]:
    """Return the outcome that holds a limit with little loss or has the lowest peak, and if the limit holds.

    Kernels of the compiler's choice are tried first. If they exceed the limit by much, small kernels follow:
    a kernel that reads little keeps little memory waiting. Last come the extremes, which depend on no
    measurement: the error names their lowest peak, and that number is reached again when given as the limit.

    Args:
        limit: bytes.
        least: the lowest limit that may be requested; may exceed `limit`.
        try_limit: asks for a limit or an extreme, with kernels that are ``small`` or not.
    """
    requested = max(limit, least)
    found = try_limit(requested, small=False)
    if found.peak_bytes <= limit:
        return _more(limit, requested, None, found, partial(try_limit, small=False)), True
    below = found.operation_bytes - (found.peak_bytes - limit)
    if least <= below and limit - below <= TUNABLES.same_kernels_share * limit:
        found = try_limit(below, small=False)
        if found.peak_bytes <= limit:
            return found, True
    above: int | None = None
    for times in range(TUNABLES.lower_requests):
        found = try_limit(requested, small=True)
        if found.peak_bytes <= limit:
            return _more(limit, requested, above, found, partial(try_limit, small=True)), True
        if requested == least:
            break
        above = requested
        requested = found.operation_bytes - (1 + times) * (found.peak_bytes - limit)
        if times + 2 == TUNABLES.lower_requests or requested < least:
            requested = least
    last = []
    for extreme, small in product(Extreme, (False, True)):
        last.append(try_limit(extreme, small=small))
        if last[-1].peak_bytes <= limit:
            return last[-1], True
    return min(last, key=lambda trial: trial.peak_bytes), False


def _more(
    limit: int,
    requested: int,
    above: int | None,
    found: Trial[Outcome],
    try_limit: Callable[[int], Trial[Outcome]],
) -> Trial[Outcome]:
    """Improve an outcome by asking for more bytes, but for fewer than `above`, which was too much."""
    for _ in range(TUNABLES.higher_requests):
        room = limit - found.peak_bytes
        if room <= TUNABLES.unused_share * limit or found.loss <= TUNABLES.lost_share:
            break
        more = requested + room if above is None else min(requested + room, (requested + above) // 2)
        other = try_limit(more)
        if other.peak_bytes > limit:
            break
        found, requested = other, more
    return found

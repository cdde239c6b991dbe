"""Search for a limit of the operations' memory with which the fused kernels hold the real limit."""

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
    """Result of a request for one limit.

    Attributes:
        peak_bytes: lower bound on the peak of the kernels; exact if within the limit.
        operation_bytes: peak of the operations, at most the requested limit.
        loss: additional time of the step compared with no limit, as a share.
        outcome: the decision and the kernels, as the caller needs them.
    """

    peak_bytes: int
    operation_bytes: int
    loss: float
    outcome: Outcome


def search_limit(
    limit: int, least: int, try_limit: Callable[..., Trial[Outcome]]
) -> tuple[Trial[Outcome], bool]:
    """Return a trial that holds a limit with little loss, else that of lowest peak; and whether it holds.

    The compiler's own kernels are tried first. If they exceed the limit by much, small kernels are tried,
    which keep fewer inputs alive. The extremes are tried last. They depend on no measurement, so their lowest
    peak, which the error names, is feasible when the user passes it as the limit.

    Args:
        limit: bytes.
        least: the lowest limit that may be requested; may exceed `limit`.
        try_limit: requests a limit or an extreme, with small kernels or not.
    """
    requested = max(limit, least)
    found = try_limit(requested, small=False)
    if found.peak_bytes <= limit:
        return _raise_request(limit, requested, None, found, partial(try_limit, small=False)), True
    below = found.operation_bytes - (found.peak_bytes - limit)
    if least <= below and limit - below <= TUNABLES.same_kernels_share * limit:
        found = try_limit(below, small=False)
        if found.peak_bytes <= limit:
            return found, True
    above: int | None = None
    for times in range(TUNABLES.lower_requests):
        found = try_limit(requested, small=True)
        if found.peak_bytes <= limit:
            return _raise_request(limit, requested, above, found, partial(try_limit, small=True)), True
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


def _raise_request(
    limit: int,
    requested: int,
    above: int | None,
    found: Trial[Outcome],
    try_limit: Callable[[int], Trial[Outcome]],
) -> Trial[Outcome]:
    """Improve a trial by requests for more bytes, below `above`, which exceeded the limit."""
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

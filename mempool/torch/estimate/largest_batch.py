"""Search for the largest batch that fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mempool.errors import UsageError
from mempool.torch.estimate.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable


class NoLargestBatchError(UsageError):
    """Error for a search that found no largest batch."""


def largest(needs: Callable[[int], int], limit_bytes: int, first: int = 1) -> int:
    """Return the largest batch that needs at most ``limit_bytes``; 0 if one sample needs more.

    Memory is assumed to grow with the batch. Memory is nearly affine in the batch, so between a batch that
    fits and a batch that does not, the search tries the intersection of the line through both with the limit;
    after a step that did not halve the interval, it tries the middle. Trials confirm that the result fits and
    that one more sample does not.

    Args:
        needs: bytes of a batch; called once for each batch.
        limit_bytes: available memory.
        first: first batch tried.

    Raises:
        NoLargestBatchError: the largest permitted batch fits, or the search exceeds its number of trials.
    """
    known = {0: 0}

    def fits(batch: int) -> bool:
        if len(known) > OPTIONS.batch_tries:
            raise NoLargestBatchError(
                f"no largest batch after {OPTIONS.batch_tries} tries: memory does not grow with the batch"
            )
        known[batch] = needs(batch)
        return known[batch] <= limit_bytes

    low, high = 0, first
    while fits(high):
        if high >= OPTIONS.batch:
            raise NoLargestBatchError(f"no largest batch: one of {high:,} still fits, and no more is tried")
        low, high = high, min(2 * high, OPTIONS.batch)
    slow = False
    while (between := high - low) > 1:
        share = 0.5 if slow else (limit_bytes - known[low]) / (known[high] - known[low])
        middle = min(max(low + int(share * between), low + 1), high - 1)
        low, high = (middle, high) if fits(middle) else (low, middle)
        slow = not slow and 2 * (high - low) > between
    return low

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
    """Return the largest batch that needs at most a number of bytes; 0 if one sample is too many.

    Memory is assumed to grow with the batch. Between a batch that fits and one that does not, the next batch
    tried is the intersection of the line through both with the limit, since memory is nearly affine in the
    batch; if that step has not halved the interval, the next is the middle. The result fits, and one more
    sample does not, by trial of both.

    Args:
        needs: bytes of a batch; called once for each batch.
        limit_bytes: available memory.
        first: first batch tried.

    Raises:
        NoLargestBatchError: even the largest batch fits, or the search does not end.
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

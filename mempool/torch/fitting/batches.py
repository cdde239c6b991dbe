"""The largest batch that fits, by search."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mempool.errors import UsageError
from mempool.torch.fitting.measure import needed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mempool.torch.fitting.job import Job

#: Batches that are tried at most, and the largest one.
MOST_TRIES, MOST_BATCH = 64, 1 << 24


class NoLargestBatchError(UsageError):
    """There is no largest batch, as far as was looked."""


def largest(needs: Callable[[int], int], limit_bytes: int, first: int = 1) -> int:
    """The largest batch that needs at most so many bytes; 0 if one sample is too many.

    What a batch needs is taken to grow with it. Between a batch that fits and one that does not, the next one
    tried is where the line through both meets the limit, since memory is nearly affine in the batch; where
    that has not halved what is between them, it is the middle then. The answer fits, and one more does not,
    by trial of both.

    Args:
        needs: bytes of a batch; called once for each.
        limit_bytes: what there is.
        first: the batch that is tried first.

    Raises:
        NoLargestBatchError: even `MOST_BATCH` fit, or it does not come to an end.
    """
    known: dict[int, int] = {}

    def need(batch: int) -> int:
        if len(known) >= MOST_TRIES:
            raise NoLargestBatchError(
                f"no largest batch after {MOST_TRIES} tries: memory does not grow with the batch"
            )
        if batch not in known:
            known[batch] = needs(batch)
        return known[batch]

    low, high = 0, first
    while need(high) <= limit_bytes:
        if high >= MOST_BATCH:
            raise NoLargestBatchError(f"no largest batch: one of {high:,} still fits, and no more is tried")
        low, high = high, min(_beyond(known, low, high, limit_bytes), MOST_BATCH)
    slow = False
    while high - low > 1:
        between = high - low
        middle = (low + high) // 2 if slow else _guess(known, low, high, limit_bytes)
        if need(middle) <= limit_bytes:
            low = middle
        else:
            high = middle
        slow = not slow and 2 * (high - low) > between
    return low


def _beyond(known: dict[int, int], low: int, high: int, limit: int) -> int:
    """A batch above one that fits that will hardly do: by the line through both, or twice as many.

    An allocator takes memory by segments: across a step the line is too steep, and the batch it tells hardly
    larger. So the way is at least doubled.
    """
    if low and known[high] > known[low]:
        slope = (known[high] - known[low]) / (high - low)
        return max(high + 2 * (high - low), int(high + (limit - known[high]) / slope) + 1)
    return 2 * high


def _guess(known: dict[int, int], low: int, high: int, limit: int) -> int:
    """A batch strictly between two: where the line between them meets the limit."""
    other = low if low else min((b for b in known if b > high), default=0)
    if not other or known[other] == known[high]:
        return (low + high) // 2
    slope = (known[high] - known[other]) / (high - other)
    return (
        min(max(int(high - (known[high] - limit) / slope), low + 1), high - 1)
        if slope > 0
        else (low + high) // 2
    )


def largest_batch(
    job: Job,
    limit_bytes: int,
    allocator: str = "pytorch",
    *,
    known: Mapping[int, int] | None = None,
    told: Callable[[str], object] = lambda _: None,
) -> int:
    """The largest batch of a job that fits in a device's memory, margins included; 0 if none does.

    Args:
        job: its batch is the one that is tried first.
        limit_bytes: of the device.
        allocator: whose reserved bytes count, by its name, with settings behind a colon.
        known: what some batches need, in bytes, so that they are not tried again.
        told: called with what is tried.

    Raises:
        UsageError: a batch cannot be tried, or there is no largest one.
    """
    known = known or {}

    def needs(batch: int) -> int:
        if batch in known:
            return known[batch]
        told(f"batch {batch:,}")
        return needed(job.but(batch=batch), allocator)

    return largest(needs, limit_bytes, job.batch)

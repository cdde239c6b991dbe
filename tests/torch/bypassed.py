"""Pools with a limit where operations pass by the mode that swaps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chain import Loop

if TYPE_CHECKING:
    from mempool.torch.eager.mode import OffloadMode

MIB = 1 << 20


def small() -> Loop:
    """A training of some operations, none of them large."""
    return Loop(6, 256)


def mode_of(pool: Any) -> OffloadMode:
    """What swaps for a pool."""
    found: OffloadMode = pool.offloading.mode
    return found


def bypass_of(pool: Any) -> Any:
    """When its operations pass by."""
    return mode_of(pool).bypass


def opened(pool: Any, loop: Loop) -> None:
    """Train until operations pass by."""
    for _ in range(40):
        loop.step()
        if bypass_of(pool).is_open:
            return
    raise AssertionError("operations are all seen")


def passes(pool: Any, act: Any) -> int:
    """How many of the last one's operations were not seen, after they could have been learned."""
    for _ in range(2):
        act()
    before = bypass_of(pool).skipped_operations
    act()
    return int(bypass_of(pool).skipped_operations - before)

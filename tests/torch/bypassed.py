"""Helpers for pools with a limit whose operations bypass the offloading mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chain import Loop

if TYPE_CHECKING:
    from mempool.torch.eager.mode import OffloadMode

MIB = 1 << 20


def small_loop() -> Loop:
    """Return a training loop of few operations without large results."""
    return Loop(6, 256)


def mode_of(pool: Any) -> OffloadMode:
    """Return the offloading mode of a pool."""
    found: OffloadMode = pool.offloading.mode
    return found


def bypass_of(pool: Any) -> Any:
    """Return the bypass of a pool's mode."""
    return mode_of(pool).bypass


def open_bypass(pool: Any, loop: Loop) -> None:
    """Train until the bypass is open."""
    for _ in range(40):
        loop.step()
        if bypass_of(pool).is_open:
            return
    raise AssertionError("operations are all seen")


def bypassed_count(pool: Any, act: Any) -> int:
    """Run a function three times; return the number of bypassed operations of the last run."""
    for _ in range(2):
        act()
    before = bypass_of(pool).skipped_operations
    act()
    return int(bypass_of(pool).skipped_operations - before)

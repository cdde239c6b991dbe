"""Statistics and limits of ``cupy.cuda.MemoryPool`` under the same names, for the current device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mempool.pool import Pool

_NO_LIMIT = 2**64 - 1


class Statistics:
    """Methods that make a `CupyPool` usable as a memory pool of CuPy's."""

    def _here(self) -> Pool | None:
        """Return the pool of the current device; None before the first allocation."""
        raise NotImplementedError

    def _pool_here(self) -> tuple[int, Pool]:
        """Return index and pool of the current device; make the pool if missing."""
        raise NotImplementedError

    def used_bytes(self) -> int:
        """Return the bytes of live arrays, rounded up as served."""
        pool = self._here()
        return 0 if pool is None else int(pool.client.stats()["live"]["current"])

    def total_bytes(self) -> int:
        """Return the bytes held from the device."""
        pool = self._here()
        return 0 if pool is None else int(pool.core.stats()["reserved"]["current"])

    def free_bytes(self) -> int:
        """Return the bytes held from the device that no client (CuPy or another) uses."""
        if (pool := self._here()) is None:
            return 0
        stats = pool.core.stats()
        return max(int(stats["reserved"]["current"]) - int(stats["live_bytes"]), 0)

    def n_free_blocks(self) -> int:
        """Return the number of free blocks outside the arena."""
        pool = self._here()
        return 0 if pool is None else int(pool.core.stats()["segment_free_blocks"])

    def free_all_blocks(self, stream: Any = None) -> None:  # noqa: ARG002 - as CuPy's
        """Return free memory of all streams to the device, whichever stream is named.

        The arena is returned too if no buffer in the arena is alive and no iteration ran since the last call,
        so a loop that calls this in every iteration keeps the arena.
        """
        pool = self._here()
        if pool is not None:
            pool.trim()

    def free_all_free(self) -> None:
        """Old name of `free_all_blocks`."""
        self.free_all_blocks()

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        """Limit the bytes that the current device's pool holds.

        Args:
            size: limit in bytes; 0 or None: no limit.
            fraction: limit as a share of the device's whole memory, from 0 to 1.

        Raises:
            ValueError: both are given, or one is out of range.
        """
        if size is not None and fraction is not None:
            raise ValueError("size and fraction cannot be given at the same time")
        pool = self._pool_here()[1]
        if fraction is not None:
            if not 0 <= fraction <= 1:
                raise ValueError(f"fraction is {fraction}, not between 0 and 1")
            size = int(fraction * pool.device.memory()[1])
        if size is not None and size < 0:
            raise ValueError(f"size {size} is negative")
        pool.core.set_max_reserved(min(size, _NO_LIMIT) if size else _NO_LIMIT)

    def get_limit(self) -> int:
        """Return the most bytes that the current device's pool may hold; 0: no limit."""
        pool = self._here()
        limit = _NO_LIMIT if pool is None else int(pool.core.stats()["max_reserved_bytes"])
        return 0 if limit == _NO_LIMIT else limit

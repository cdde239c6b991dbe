"""Errors of the pool: few types, each a subclass of a built-in error that programs catch already."""

from __future__ import annotations


class MempoolError(Exception):
    """Base class of the pool's own errors."""


class UsageError(MempoolError, RuntimeError):
    """A call that is invalid now: nested iterations, a second install, an unknown setting."""


class OutOfMemoryError(MempoolError, MemoryError):
    """The device has no free memory, and the pool has no free memory to release.

    Attributes:
        asked_bytes: requested size.
        live_bytes: bytes in use, by all clients of the pool.
        reserved_bytes: bytes held from the device.
        arena_bytes: part of ``reserved_bytes`` in the arena.
        limit_bytes: ``max_reserved``, or None.
    """

    def __init__(self, numbers: dict[str, int]) -> None:
        self.asked_bytes = numbers["asked_bytes"]
        self.live_bytes = numbers["live_bytes"]
        self.reserved_bytes = numbers["reserved_bytes"]
        self.arena_bytes = numbers["arena_bytes"]
        limit = numbers["limit_bytes"]
        self.limit_bytes = None if limit >= 2**63 else limit
        limited = "" if self.limit_bytes is None else f", limited to {self.limit_bytes:,}"
        super().__init__(
            f"out of memory: {self.asked_bytes:,} bytes asked for; {self.live_bytes:,} live, "
            f"{self.reserved_bytes:,} reserved ({self.arena_bytes:,} of them planned){limited}"
        )

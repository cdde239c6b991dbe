"""Metadata of installed plans: possible improvements, and the pinned ranges that each plan avoids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mempool.planning.backoff import Rarely

if TYPE_CHECKING:
    from collections.abc import Iterable

    Ranges = set[tuple[int, int]]


class Prospects:
    """Metadata of one client's plans, by plan key.

    Attributes:
        improvable: keys of plans that may use more memory than needed.
        hard: keys of plans that a longer search may improve.
        blocked: backoff of planning around pinned ranges.
    """

    def __init__(self) -> None:
        self.improvable: set[bytes] = set()
        self.hard: set[bytes] = set()
        self.blocked = Rarely()
        self._around: dict[bytes, Ranges] = {}
        self._longer: dict[bytes, Rarely] = {}

    def begin_anew(self) -> None:
        """Reset the backoff for a new pattern, whose plan may be blocked by pinned ranges at once."""
        self.blocked = Rarely()

    def around(self, key: bytes) -> Ranges:
        """Return the arena ranges that a plan avoids."""
        return self._around.get(key, set())

    def made_around(self, key: bytes, ranges: Iterable[tuple[int, int]]) -> None:
        """Set the arena ranges that a plan avoids."""
        self._around[key] = set(ranges)

    def longer(self, key: bytes) -> Rarely:
        """Return the backoff of replanning a pattern for longer lifetimes."""
        return self._longer.setdefault(key, Rarely())

    def keep(self, keys: set[bytes]) -> None:
        """Drop the metadata of all plans except `keys`."""
        self.improvable &= keys
        self.hard &= keys
        self._around = {key: ranges for key, ranges in self._around.items() if key in keys}
        self._longer = {key: longer for key, longer in self._longer.items() if key in keys}

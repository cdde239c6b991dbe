"""What may still become of plans: which may get better, what each was made around."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mempool.rest import Rarely

if TYPE_CHECKING:
    from collections.abc import Iterable

    Ranges = set[tuple[int, int]]


class Prospects:
    """Of the plans of one client, by their keys; nothing is known of them at first.

    Attributes:
        improvable: plans that may be for more than is needed.
        hard: plans that a longer search might make good.
        blocked: when they may be made again around what stays in their way.
    """

    def __init__(self) -> None:
        self.improvable: set[bytes] = set()
        self.hard: set[bytes] = set()
        self.blocked = Rarely()
        self._around: dict[bytes, Ranges] = {}
        self._longer: dict[bytes, Rarely] = {}

    def begin_anew(self) -> None:
        """What was never planned before is: what stays may be in its way at once."""
        self.blocked = Rarely()

    def around(self, key: bytes) -> Ranges:
        """Ranges of the arena that a plan was made around."""
        return self._around.get(key, set())

    def made_around(self, key: bytes, ranges: Iterable[tuple[int, int]]) -> None:
        """A plan keeps out of these ranges."""
        self._around[key] = set(ranges)

    def longer(self, key: bytes) -> Rarely:
        """When a plan may be made again for longer lifetimes."""
        return self._longer.setdefault(key, Rarely())

    def keep(self, keys: set[bytes]) -> None:
        """Forget what is known of other plans."""
        self.improvable &= keys
        self.hard &= keys
        self._around = {key: ranges for key, ranges in self._around.items() if key in keys}
        self._longer = {key: longer for key, longer in self._longer.items() if key in keys}

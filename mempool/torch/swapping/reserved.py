"""What the pool holds beside what lives: where that is over the limit, moves are planned for less."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mempool import _core

#: Iterations in which the pool neither missed nor changed its plan, after which its memory is as it stays.
_CALM = 4
#: How often plans are made for less, and how often again after that it is looked at, in iterations.
_MOST_ROUNDS, _REST = 4, 32
#: The largest part of the limit that is given up for the pool's gaps.
_MOST_PART = 4


class Reserved:
    """Looks at a pool after each iteration that went by plan.

    A plan of moves keeps the load within the limit. What the pool reserves is that and gaps: its own plan of
    addresses may not reach the peak load, and segments of before are kept. So free segments are given back
    first, then the moves are planned for as much less as is missing.

    Attributes:
        margin_bytes: by how much less than the limit plans should hold.
    """

    def __init__(self, client: _core.Client | None, limit_bytes: int) -> None:
        """Look at the pool of a client; without one at nothing."""
        self._client = client
        self._limit_bytes = limit_bytes
        self._seen: tuple[int, int] | None = None
        self._calm = self._rounds = 0
        self._trimmed = False
        self._last = 1 << 62
        self.margin_bytes = 0

    def unrest(self) -> None:
        """The moves have changed, so the pool has to learn again."""
        self._seen, self._calm, self._trimmed = None, 0, False

    def should_shrink(self) -> bool:
        """Whether the next plan should be made, for a margin that has grown; after each planned iteration."""
        if self._client is None or self._rounds >= _MOST_ROUNDS or not self._is_calm():
            return False
        reserved = int(self._client.pool.stats()["reserved"]["current"])
        over = reserved - self._limit_bytes
        if over <= 0:
            self._calm = -_REST
        elif not self._trimmed:
            self._trimmed = True
            self._client.give_back()
        else:
            helped, self._last = reserved < self._last, reserved
            self._rounds = self._rounds + 1 if helped else _MOST_ROUNDS
            before = self.margin_bytes
            self.margin_bytes = min(before + over * helped, self._limit_bytes // _MOST_PART)
            return self.margin_bytes > before
        return False

    def _is_calm(self) -> bool:
        assert self._client is not None
        state, stats = self._client.state(), self._client.stats()
        misses = sum(stats["latest"].values()) - stats["latest"].get("hit", 0)
        seen = state["latest_plan_active_at_iteration"], misses
        self._calm = self._calm + 1 if seen == self._seen and state["replaying"] else min(self._calm, 0)
        self._seen = seen
        return self._calm >= _CALM

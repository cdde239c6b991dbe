"""Headroom of a pool under a limit: the pool holds more than the live bytes, and all of that counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.logs import log
from mempool.reporting.outcomes import missed
from mempool.units import sized

if TYPE_CHECKING:
    from mempool import _core
    from mempool.torch.eager.storages import Storages

#: The core's value for no budget.
_NONE = (1 << 64) - 1
#: Divisor of the limit: an excess above that share is reported.
_TOLD = 50
#: Divisor of the limit: for operations from that share on, the pool's misses are checked.
_LARGE = 64


class Room:
    """The pool's own headroom, read before an operation that takes memory.

    Beyond the live bytes, the pool holds partly free pages, small blocks, memory of other threads and
    libraries, and an arena as a whole, however full: none of these can be released.

    Attributes:
        arena: whether the pool has the arena of the current plan, where all planned buffers have places.
        limit_bytes: most bytes that the pool holds; above the requested limit if that cannot be held.
        holds_arena: whether the pool has any arena.
        asks: whether to ask the pool; False while an iteration goes by the pool's plan.
        beside_bytes: most bytes held by the pool for no known storage since `begin`, while it had no arena.
    """

    def __init__(self, client: _core.Client, storages: Storages, limit_bytes: int) -> None:
        """Set the limit as the budget of the client's pool."""
        self._client, self._pool = client, client.pool
        self._storages = storages
        self.limit_bytes = self._asked_bytes = limit_bytes
        self.arena = self.holds_arena = False
        self.asks = True
        self.beside_bytes = 0
        self._pool.set_budget(limit_bytes)
        self._told_bytes = 0
        self._missed = 0  # misses when the iteration began

    def hold(self, least_bytes: int) -> None:
        """Keep the requested limit, or `least_bytes` if less cannot be held."""
        self.limit_bytes = max(least_bytes, self._asked_bytes)
        self._pool.set_budget(self.limit_bytes)

    def begin(self, *, by_plan: bool) -> None:
        """Begin an iteration, or a phase with a new arena; with ``by_plan``, only the plan moves storages."""
        self.asks = not (self.arena and by_plan)
        self.beside_bytes = 0
        self._missed = 0 if self.asks else self._misses()

    def lacks(self, more: int) -> bool:
        """Return whether the pool lacks room for `more` bytes, as far as the pool is asked.

        In an iteration by the pool's plan, the pool is asked again after an allocation missed its planned
        place, as when the plan is for another pattern: large results must not be allocated outside the arena
        then.
        """
        if not self.asks:
            if more < self.limit_bytes // _LARGE or self._misses() == self._missed:
                return False
            self.asks = True
        return more > self.left()

    def differs(self, more: int) -> None:
        """Ask the pool again if an operation makes many more bytes than in this place the last time."""
        self.asks |= more >= self.limit_bytes // _LARGE

    def _misses(self) -> int:
        """Return the total number of allocations that missed the pool's plan."""
        return missed(self._client.stats()["outcomes"])

    def left(self) -> int:
        """Return the bytes that operations may still allocate."""
        storages = self._storages
        room: int = self._pool.room()
        if not self.holds_arena:
            beside = self.limit_bytes - room - storages.here_bytes + storages.outside_bytes
            self.beside_bytes = max(self.beside_bytes, beside)
        return room - storages.outside_bytes

    def values(self) -> dict[str, Any]:
        """Return report entries: how often the pool exceeded the budget, and the largest excess in bytes."""
        stats = self._pool.stats()
        more = max(stats["reserved"]["peak"] - self._asked_bytes, 0)
        return {"beyond": stats["beyond_budget"], "beyond_bytes": more if stats["beyond_budget"] else 0}

    def tell(self) -> None:
        """Warn if the pool clearly exceeded the limit, and again once the excess has doubled."""
        more = self.values()["beyond_bytes"]
        if more <= max(self._asked_bytes // _TOLD, 2 * self._told_bytes - 1):
            return
        self._told_bytes = more
        log.warning(
            "the pool held %s more than the limit of %s: operations needed so much at once, or took more for "
            "themselves than is known of them, or tensors came that nothing was known of, as from a file",
            sized(more),
            sized(self._asked_bytes),
        )

    def end(self) -> None:
        """Remove the budget."""
        self.tell()
        self.asks = False
        self._pool.set_budget(_NONE)

"""How much more a pool can serve within a limit: it holds more than what lives, and all of that counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.logs import log
from mempool.report import missed, sized

if TYPE_CHECKING:
    from mempool import _core
    from mempool.torch.swapping.storages import Storages

#: No budget, as the core has it.
_NONE = (1 << 64) - 1
#: By what part of the limit more may be held before that is told.
_TOLD = 50
#: From what part of the limit on the room for an operation is worth a look at what was missed.
_LARGE = 64


class Room:
    """The pool's own word on what it holds, asked before an operation that takes memory.

    Beside what lives that is pages of which a part is free, small blocks, what other threads and libraries
    have, and an arena as a whole, however full: none of that can be given back.

    Attributes:
        arena: whether the pool has the arena of its plan, where all that is planned has its place.
        limit_bytes: what the pool holds at most; more than was asked for where less cannot be held.
        holds_arena: whether it has any.
        asks: whether the pool is to be asked: not while an iteration goes by plan there.
        beside_bytes: most that the pool held beside what swapping knows, since `begin`, if it had no arena.
    """

    def __init__(self, client: _core.Client, storages: Storages, limit_bytes: int) -> None:
        """Have the pool of a client keep the limit as its budget."""
        self._client, self._pool = client, client.pool
        self._storages = storages
        self.limit_bytes = self._asked_bytes = limit_bytes
        self.arena = self.holds_arena = False
        self.asks = True
        self.beside_bytes = 0
        self._pool.set_budget(limit_bytes)
        self._told_bytes = 0
        self._missed = 0  # when the iteration began

    def hold(self, least_bytes: int) -> None:
        """Keep the limit, or where less than this cannot be held, this."""
        self.limit_bytes = max(least_bytes, self._asked_bytes)
        self._pool.set_budget(self.limit_bytes)

    def begin(self, *, by_plan: bool) -> None:
        """An iteration begins, or its arena has come: is what is here by plan alone?"""
        self.asks = not (self.arena and by_plan)
        self.beside_bytes = 0
        self._missed = 0 if self.asks else self._misses()

    def lacks(self, more: int) -> bool:
        """Whether the pool has no room for so many bytes, as far as it is asked.

        Of an iteration that goes by plan there it is asked again once something did not find its place, as
        where the plan is of another kind of iteration: what is large must not be taken beside the arena then.
        """
        if not self.asks:
            if more < self.limit_bytes // _LARGE or self._misses() == self._missed:
                return False
            self.asks = True
        return more > self.left()

    def differs(self, more: int) -> None:
        """An operation makes so much more than what it made in this place the last time."""
        self.asks |= more >= self.limit_bytes // _LARGE

    def _misses(self) -> int:
        """Allocations that did not follow the pool's plan, ever."""
        return missed(self._client.stats()["outcomes"])

    def left(self) -> int:
        """Bytes that operations may take."""
        storages = self._storages
        room: int = self._pool.room()
        if not self.holds_arena:
            beside = self.limit_bytes - room - storages.here_bytes + storages.outside_bytes
            self.beside_bytes = max(self.beside_bytes, beside)
        return room - storages.outside_bytes

    def values(self) -> dict[str, Any]:
        """What there is to report: how often the pool took more than the limit, and how much at most."""
        stats = self._pool.stats()
        more = max(stats["reserved"]["peak"] - self._asked_bytes, 0)
        return {"beyond": stats["beyond_budget"], "beyond_bytes": more if stats["beyond_budget"] else 0}

    def tell(self) -> None:
        """Say that the pool held clearly more than the limit, and again when it was twice as much."""
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
        """No limit any more."""
        self.tell()
        self.asks = False
        self._pool.set_budget(_NONE)

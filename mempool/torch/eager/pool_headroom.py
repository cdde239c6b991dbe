"""Headroom of a pool under a limit, which covers all memory that the pool holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.logs import log
from mempool.torch.offload.options import OPTIONS
from mempool.units import sized

if TYPE_CHECKING:
    from mempool import _core
    from mempool.torch.eager.storages import StorageRegistry

#: The core's value for no budget.
_NONE = (1 << 64) - 1


class PoolHeadroom:
    """Headroom of the pool, read before an operation that allocates memory.

    In addition to the live bytes, the pool holds partly free pages, small blocks, memory of other threads and
    libraries, and the whole arena, even if mostly free. The pool cannot release any of these.

    Attributes:
        has_places: whether the arena has places for all buffers that the pool has plans for.
        serves_schedule: whether one of these plans is for the current schedule.
        limit_bytes: most bytes that the pool may hold; more than the requested limit if that is infeasible.
        holds_arena: whether the pool has any arena.
        is_checked: whether to ask the pool; False while an iteration goes by the pool's plan.
        defers_registration: whether operations run without the mode, so that storages are registered later.
        misses_before: allocations that had missed the pool's plan when the iteration began.
        foreign_bytes: most bytes that the pool held since `begin` for no known storage, while without an
            arena.
    """

    def __init__(self, client: _core.Client, storages: StorageRegistry, limit_bytes: int) -> None:
        """Set the limit as the budget of the client's pool."""
        self._client, self._pool = client, client.pool
        self._storages = storages
        self.limit_bytes = self._requested_bytes = limit_bytes
        self.has_places = self.serves_schedule = self.holds_arena = self.defers_registration = False
        self.is_checked = True
        self.foreign_bytes = 0
        self._pool.set_budget(limit_bytes)
        self._reported_bytes = 0
        self._peak_before = 0  # peak before the limit was requested
        self.misses_before = 0
        self._final: dict[str, Any] | None = None  # values at the end

    def request(self, limit_bytes: int) -> None:
        """Replace the requested limit; memory allocated before does not count as excess."""
        self._requested_bytes, self._peak_before = limit_bytes, self._pool.stats()["reserved"]["peak"]
        self.set_limit(0)

    def set_limit(self, least_bytes: int) -> None:
        """Hold the requested limit, or `least_bytes` if that is the smallest feasible limit."""
        self.limit_bytes = max(least_bytes, self._requested_bytes)
        self._pool.set_budget(self.limit_bytes)

    def begin(self, *, by_plan: bool) -> None:
        """Begin an iteration, or a phase with a new arena; `by_plan`: only the schedule moves storages."""
        self.is_checked = not (self.serves_schedule and by_plan)
        if not self.defers_registration:
            self.foreign_bytes = 0
        self.misses_before = 0 if self.is_checked else self._client.misses()

    def lacks(self, more: int) -> bool:
        """Return whether the pool is known to lack room for `more` bytes.

        In an iteration that follows the pool's plan, the pool is asked only after an allocation missed its
        planned slot, for example because the plan is for another pattern: then large results must not be
        allocated outside the arena.
        """
        if not self.is_checked:
            if more < self.limit_bytes // OPTIONS.checked_operation_divisor or (
                self._client.misses() == self.misses_before and self._client.unplanned_bytes(more) < more
            ):
                return False
            self.is_checked = True
        return more > self.remaining_bytes()

    def note_growth(self, more: int) -> None:
        """Ask the pool again if an operation allocates many more bytes than last time at this position."""
        self.is_checked |= more >= self.limit_bytes // OPTIONS.checked_operation_divisor

    def remaining_bytes(self) -> int:
        """Return the bytes that operations may still allocate."""
        storages = self._storages
        room: int = self._pool.room()
        if not (self.holds_arena or self.defers_registration):
            beside = self.limit_bytes - room - storages.resident_bytes + storages.foreign_bytes
            self.foreign_bytes = max(self.foreign_bytes, beside)
        return room - storages.foreign_bytes

    def give_back(self) -> None:
        """Release free memory, and the free parts of the arena."""
        self.is_checked = True
        self._client.give_back(force=True)

    def prepare(self, sizes: tuple[int, ...], stream: Any) -> None:
        """Allocate and free blocks of these sizes if the pool must release memory to obtain them."""
        if sum(sizes) <= self.limit_bytes - self._pool.stats()["reserved"]["current"]:
            return
        handle = stream.cuda_stream
        for address in [self._client.allocate(size, handle) for size in sizes if size]:
            if address:
                self._client.free(address, handle)

    def values(self) -> dict[str, Any]:
        """Return report entries: number of excesses of the budget, and the largest excess in bytes."""
        if self._final is not None:
            return self._final
        stats = self._pool.stats()
        reserved = stats["reserved"]
        most = reserved["peak"] if reserved["peak"] > self._peak_before else reserved["current"]
        more = max(most - self._requested_bytes, 0)
        return {"beyond": stats["beyond_budget"], "beyond_bytes": more if stats["beyond_budget"] else 0}

    def warn_of_excess(self) -> None:
        """Warn if the pool clearly exceeded the limit, and again once the excess has doubled."""
        more = self.values()["beyond_bytes"]
        if more <= max(
            self._requested_bytes // OPTIONS.reported_excess_divisor, 2 * self._reported_bytes - 1
        ):
            return
        self._reported_bytes = more
        log.warning(
            "the pool held %s more than the limit of %s: single operations needed so much at once or took "
            "workspace that is not measured yet, tensors are used outside PyTorch (NumPy, DLPack) or by "
            "other threads, or are unknown to the pool, as from a file",
            sized(more),
            sized(self._requested_bytes),
        )

    def end(self) -> None:
        """Remove the budget; memory taken later is not counted as an excess."""
        self.warn_of_excess()
        self._final = self.values()
        self.is_checked = False
        self._pool.set_budget(_NONE)


class PoolLearning:
    """Switch of a pool's learning: a pool must not learn an iteration whose moves still change.

    Each change of the moves changes the lifetimes of the same requests. A pool with a plan for earlier
    lifetimes would find planned slots occupied, and replan around them with an ever larger arena. Until a
    pool has a plan, the pool reserves little more than the live bytes.
    """

    def __init__(self, client: _core.Client | None) -> None:
        """Stop a client's pool from learning; without a client, do nothing."""
        self._client = client
        self._is_on = True
        self.set(on=False)

    def set(self, *, on: bool) -> None:
        """Start or stop the pool's learning."""
        if self._client is not None and on != self._is_on:
            self._is_on = on
            if on:
                self._client.leave_dynamic()
            else:
                self._client.enter_dynamic()

    def begin(self) -> None:
        """Let the pool plan iterations with a stable offload schedule.

        Return excess memory to the device first.
        """
        if self._client is not None and not self._is_on:
            self._client.give_back()
        self.set(on=True)

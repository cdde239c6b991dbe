"""Lets operations skip the dispatch mode while nothing has to move.

The mode's handling in Python takes many times a small operation's own time, and is of no use while the
program stays clearly below the limit. In that state, the interposer (``interposer.cpp``) checks each
operation first. An operation runs without the mode if the mode has seen the operation with the same shapes,
if the operation uses the usual stream, and if there is ample room. The interposer records the order in which
storages are used, so that the mode knows that order when room becomes scarce. Meanwhile, the pool plans as
without a limit.

Once iterations follow the pool's plan, the mode stands by: the mode is off the stack, and the interposer
compares nothing until a request departs from the plan or the pool lacks room.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

import torch

from mempool import _core
from mempool.settings import NEVER
from mempool.torch.eager import interposer
from mempool.torch.eager.storages import OFFLOADED
from mempool.torch.offload.hidden import hidden_from_program
from mempool.torch.offload.options import OPTIONS

if TYPE_CHECKING:
    from mempool.torch.eager.arena_admission import ArenaAdmission
    from mempool.torch.eager.iterations import Iterations
    from mempool.torch.eager.operator_traits import OperatorTraits
    from mempool.torch.eager.pool_headroom import PoolHeadroom
    from mempool.torch.eager.storages import StorageRegistry
    from mempool.torch.eager.transfers import OffloadCounters, TransferManager


def _is_compiling() -> bool:
    """Return whether the program has compiled functions, which a dispatch mode would make run uncompiled."""
    return any(one is not None for one in torch._dynamo.eval_frame.cached_backends.values())


class Bypass:
    """Decides when operations skip a mode, and reports the storages that they used.

    Attributes:
        is_open: whether operations skip the mode; nothing is evicted meanwhile.
        is_standing_by: whether the mode is also off the stack, and the interposer compares no operations.
    """

    def __init__(
        self,
        mode: Any,
        client: _core.Client,
        room: PoolHeadroom,
        storages: StorageRegistry,
        iterations: Iterations,
        transfers: TransferManager,
        admission: ArenaAdmission,
        counts: OffloadCounters,
    ) -> None:
        """Start closed: the mode sees all operations."""
        self._mode, self._client, self._headroom = mode, client, room
        self._storages, self._iterations, self._transfers, self._counts = (
            storages,
            iterations,
            transfers,
            counts,
        )
        self._admission = admission
        self._library = interposer.library()
        self.is_available = True
        self.calm_iterations, self._required = 0, OPTIONS.bypass_iterations
        self._passed_before = 0  # operations that had passed at the opening
        self.is_open = self.is_standing_by = False
        self._planned_iterations, self._required_planned = 0, OPTIONS.standby_iterations
        self._misses = self._unplanned_iterations = 0
        self._has_stood_by = False  # since the bypass opened

    # --- opening and closing

    def record_peak(self, most: int) -> None:
        """Record the peak bytes of an iteration that the mode saw; open the bypass after enough low peaks."""
        counts, limit = self._counts, self._headroom.limit_bytes
        moved = counts.iteration_in_bytes > 0 or counts.iteration_out_bytes > 0
        records = [] if moved else list(self._storages.records.values())
        away = sum(record.rounded_bytes for record in records if record.state == OFFLOADED)
        is_calm = (
            not moved and most + away <= self._iterations.limit_bytes - limit // OPTIONS.bypass_open_divisor
        )
        self.calm_iterations = self.calm_iterations + 1 if is_calm else 0
        if self.calm_iterations >= self._required:
            self.open()

    def open(self) -> None:
        """Reload all storages and let operations skip the mode; no effect if that is impossible."""
        if self.is_open or not self.is_available or threading.get_ident() != self._transfers.thread:
            return
        library = self._library
        self._reload_all()
        cuda, reserve = self._storages.device == "cuda", self._reserve_bytes()
        room, unplanned = _core.torch_room_function(), _core.torch_unplanned_function()
        self._passed_before = library.mempool_bypass_count()
        self._transfers.holds_all = self.is_open = True  # set first, as Ctrl-C may come between
        if library.mempool_bypass_open(id(self._mode), cuda, room, unplanned, self._client.handle, reserve):
            self._iterations.let_pool_learn()
            self._client.set_arena_allowed(True)
        else:
            self._transfers.holds_all = self.is_open = False

    def _reserve_bytes(self) -> int:
        """Return the bytes that must remain free in the pool after an unseen operation."""
        return self._headroom.limit_bytes // OPTIONS.bypass_reserve_divisor + self._storages.foreign_bytes

    def _reload_all(self) -> None:
        """Reload all storages, and drop the host copies, since unseen operations may make them stale."""
        self._iterations.suspend()
        known = list(self._storages.records.values())
        self._admission.reload_to_places(known, [])
        for record in known:
            self._transfers.drop_copy(record)

    def close(self) -> list[torch.Tensor]:
        """Let the mode see operations again.

        Returns:
            uint8[n] of each living storage that was used meanwhile, the last used last; after a standby,
            before these all tensors that Python knows.
        """
        if not self.is_open:
            return []
        self.abandon()
        self._client.set_arena_allowed(False)
        self._counts.bypassed += self._library.mempool_bypass_count() - self._passed_before
        self.calm_iterations, self._required = 0, min(2 * self._required, OPTIONS.bypass_max_iterations)
        with hidden_from_program():
            taken: list[torch.Tensor] = torch.ops.mempool_interposer.taken()
        stood_by, self._has_stood_by = self._has_stood_by, False
        return [*self._storages.python_tensors(), *taken] if stood_by else taken

    def abandon(self) -> None:
        """Let the mode see operations again without taking a lock, as needed in a forked child."""
        self.resume()
        if self.is_open:
            self._library.mempool_bypass_close()
            self._transfers.holds_all = self.is_open = False

    def end(self) -> None:
        """Close the bypass permanently."""
        self.is_available = False
        self.close()

    # --- standing by

    def end_iteration(self) -> None:
        """End an iteration.

        Stand by after enough iterations that followed the pool's plan with an open bypass.
        """
        if threading.get_ident() != self._transfers.thread:
            return
        before, self._misses = self._misses, self._client.misses()
        is_planned = self._misses == before
        if self.is_standing_by:
            self._unplanned_iterations += not is_planned
            is_lost = self._unplanned_iterations > OPTIONS.standby_iterations
            if self._library.mempool_standby_departed() or is_lost:
                self.resume()
            else:
                self._watch(most_misses=self._misses if is_planned else NEVER)
            return
        self._library.mempool_standby_end(id(self._mode))  # PyTorch may have restored the stack of before
        self._planned_iterations = self._planned_iterations + 1 if is_planned and self.is_open else 0
        if self._planned_iterations >= self._required_planned and not (
            _is_compiling() or self._keeps_addresses()
        ):
            self.stand_by()

    def _keeps_addresses(self) -> bool:
        """Return whether an operation of the program keeps addresses: the mode must see such programs."""
        traits = [one for one in list(self._mode.traits.by_id.values()) if not one.may_be_followed]
        return any(one.effects is not None and one.effects.retains_tensors for one in traits)

    def stand_by(self) -> None:
        """Take the mode off the stack until the program needs more memory."""
        if self.is_standing_by:
            return
        self.is_standing_by = self._has_stood_by = True  # set first, as Ctrl-C may come between
        if self._library.mempool_standby_begin(id(self._mode)):
            self._watch(most_misses=NEVER)  # without a mode, PyTorch allocates differently
            self._unplanned_iterations = 0
        else:
            self.is_standing_by = False

    def _watch(self, *, most_misses: int) -> None:
        """Put the mode back once the pool lacks room, or an iteration departs from the plan."""
        wake = ctypes.cast(self._library.mempool_standby_wake, ctypes.c_void_p).value
        limit, outside = self._headroom.limit_bytes, self._storages.foreign_bytes
        most = limit - limit // OPTIONS.standby_reserve_divisor - outside
        self._client.watch_departures(wake or 0, most_reserved=max(most, 0), most_misses=most_misses)

    def resume(self) -> None:
        """Put the mode back on the stack if the mode stands by."""
        if not self.is_standing_by:
            return
        self._client.watch_departures(0)
        self._library.mempool_standby_end(id(self._mode))
        self._planned_iterations = 0
        self._required_planned = min(2 * self._required_planned, OPTIONS.bypass_max_iterations)
        self.is_standing_by = False

    # --- operations seen while the bypass is open

    def lacks(self, more: int) -> bool:
        """Return whether the pool lacks room for the part of `more` bytes that its plan does not contain."""
        return bool(self._library.mempool_bypass_lacks(self._reserve_bytes(), more))

    def learn(self, traits: OperatorTraits, footprint: int) -> None:
        """Let later operations with the same traits and footprint skip the mode, if the traits allow that."""
        if (schema := getattr(traits.function, "_schema", None)) is not None:
            name, overload = schema.name.encode(), schema.overload_name.encode()
            blank = traits.effects is not None and traits.effects.leaves_unwritten
            views, bytes_ = (traits.views, footprint) if traits.may_pass else (False, -1)
            self._library.mempool_bypass_learn(name, overload, views, blank, bytes_)

    @property
    def skipped_operations(self) -> int:
        """Return the number of operations that skipped the mode since the opening."""
        if not self.is_open:
            return 0
        return int(self._library.mempool_bypass_count()) - self._passed_before

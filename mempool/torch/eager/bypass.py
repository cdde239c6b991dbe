"""Lets operations skip the dispatch mode while nothing has to move.

For a small operation, handling by the mode in Python takes many times the operation's own time, without any
benefit while a program stays clearly below the limit. So then a library (``bypass.cpp``) checks each
operation first: an operation that the mode has seen with tensors of the same shapes, on the stream that all
operations use, and with ample room, runs without the mode. The library keeps the order of the storages in
use, so that all are known at once when room becomes scarce. Meanwhile, the pool plans as without a limit.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mempool import _core
from mempool.errors import UsageError
from mempool.logs import log
from mempool.torch.compiled_library import Source
from mempool.torch.eager.storages import AWAY
from mempool.torch.eager.transfers import between_us

if TYPE_CHECKING:
    from mempool.torch.eager.arena_admission import Arrival
    from mempool.torch.eager.iterations import Iterations
    from mempool.torch.eager.operator_traits import Kind
    from mempool.torch.eager.pool_headroom import Room
    from mempool.torch.eager.report import SwapCounts
    from mempool.torch.eager.storages import Storages
    from mempool.torch.eager.transfers import Mover

SOURCE = Source(Path(__file__).with_name("bypass.cpp"), ("c10", "torch_cpu"), "mempool_bypass_open")
#: Divisors of the limit: the room that an iteration has to leave before later iterations may go unseen, and
#: the room that each unseen operation has to leave.
_LEFT_BEFORE, _LEFT_MEANWHILE = 8, 32
#: Number of such iterations in a row before the bypass opens, initially and at most: each closing doubles the
#: number.
_CALM, _MOST_CALM = 2, 64


class Bypass:
    """Decides when operations skip a mode, and reports the storages that they used.

    Attributes:
        is_open: whether operations skip the mode; nothing is evicted meanwhile.
    """

    def __init__(
        self,
        mode: Any,
        client: _core.Client,
        room: Room,
        storages: Storages,
        iterations: Iterations,
        mover: Mover,
        arrival: Arrival,
        counts: SwapCounts,
    ) -> None:
        """Start closed: the mode sees all operations."""
        self._mode, self._client, self._room = mode, client, room
        self._storages, self._iterations, self._mover, self._counts = storages, iterations, mover, counts
        self._arrival = arrival
        self._library: ctypes.CDLL | None = None
        self._possible = True
        self._calm, self._patience = 0, _CALM
        self._before = 0  # operations that had passed at the opening
        self.is_open = False

    # --- opening and closing

    def look(self, most: int) -> None:
        """Record the peak of a seen iteration, in bytes; open the bypass after enough calm iterations."""
        counts, limit = self._counts, self._room.limit_bytes
        moved = counts.iteration_in_bytes > 0 or counts.iteration_out_bytes > 0
        away = sum(held.room for held in list(self._storages.known.values()) if held.state == AWAY)
        is_calm = not moved and most + away <= self._iterations.limit_bytes - limit // _LEFT_BEFORE
        self._calm = self._calm + 1 if is_calm else 0
        if self._calm >= self._patience:
            self.open()

    def open(self) -> None:
        """Reload all storages and let operations skip the mode; no effect if that is impossible."""
        if self.is_open or not self._possible or threading.get_ident() != self._mover.thread:
            return
        try:
            library = self._library = _library()
        except UsageError as error:  # no compiler
            log.info("each operation is seen within the limit: %s", str(error))
            self._possible = False
            return
        self._have_all()
        cuda = self._storages.device == "cuda"
        room, client = _core.torch_room_function(), self._client.handle
        self._before = library.mempool_bypass_count()
        self._mover.stays = self.is_open = True  # set first, as Ctrl-C may come between
        if library.mempool_bypass_open(id(self._mode), cuda, room, client, self._left()):
            self._iterations.settled()
            self._client.set_arena_allowed(True)
        else:
            self._mover.stays = self.is_open = False

    def _left(self) -> int:
        """Return the bytes that must remain free in the pool after an unseen operation."""
        return self._room.limit_bytes // _LEFT_MEANWHILE + self._storages.outside_bytes

    def _have_all(self) -> None:
        """Reload all storages, and drop host copies, which unseen operations could make stale."""
        self._iterations.unseen()
        known = list(self._storages.known.values())
        self._arrival.bring(known, [])
        for held in known:
            self._mover.forget(held)

    def close(self) -> list[torch.Tensor]:
        """Let the mode see operations again.

        Returns:
            uint8[n] of each living storage that was used meanwhile, the last used last.
        """
        if not self.is_open or self._library is None:
            return []
        self.abandon()
        self._client.set_arena_allowed(False)
        self._counts.bypassed += self._library.mempool_bypass_count() - self._before
        self._calm, self._patience = 0, min(2 * self._patience, _MOST_CALM)
        with between_us():
            taken: list[torch.Tensor] = torch.ops.mempool_bypass.taken()
        return taken

    def abandon(self) -> None:
        """Let the mode see operations again without taking a lock, as needed in a forked child."""
        if self.is_open and self._library is not None:
            self._library.mempool_bypass_close()
            self._mover.stays = self.is_open = False

    def end(self) -> None:
        """Close the bypass for good."""
        self._possible = False
        self.close()
        if self._library is not None:
            self._library.mempool_bypass_leave()

    # --- operations seen while the bypass is open

    def lacks(self, more: int) -> bool:
        """Return whether there is too little room for `more` bytes."""
        if self._library is not None:
            self._library.mempool_bypass_reserve(self._left())  # foreign memory may have been added
        return self._room.left() - more < self._room.limit_bytes // _LEFT_MEANWHILE

    def learn(self, kind: Kind, need: int) -> None:
        """Let later operations like this seen one skip the mode, if the traits allow; `need`: footprint."""
        if self._library is not None and (schema := getattr(kind.function, "_schema", None)) is not None:
            name, overload = schema.name.encode(), schema.overload_name.encode()
            blank = kind.odd is not None and kind.odd.blank
            views, bytes_ = (kind.views, need) if kind.may_pass else (False, -1)
            self._library.mempool_bypass_learn(name, overload, views, blank, bytes_)

    @property
    def passed(self) -> int:
        """Return the number of operations that skipped the mode since the opening."""
        if not self.is_open or self._library is None:
            return 0
        return int(self._library.mempool_bypass_count()) - self._before


@functools.cache
def _library() -> ctypes.CDLL:
    library = SOURCE.load()
    try:
        torch.ops.load_library(library._name)
    except (OSError, RuntimeError) as error:
        raise UsageError(f"PyTorch does not take the bypass: {error}") from None
    library.mempool_bypass_reserve.argtypes = [ctypes.c_int64]
    library.mempool_bypass_open.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
    ]  # fmt: skip
    library.mempool_bypass_learn.argtypes = [
        ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int64
    ]  # fmt: skip
    library.mempool_bypass_count.restype = ctypes.c_uint64
    _tell_higher_order(torch._C.DispatchKey(library.mempool_bypass_key()))
    return library


def _tell_higher_order(key: Any) -> None:
    """Make Python's dispatch of higher-order operations fall through the bypass's key."""
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)
    for one in torch._ops._higher_order_ops.values():
        one.fallthrough(key)

"""Support for forked processes: a forked child evicts nothing, and reloads storages on demand."""

from __future__ import annotations

import functools
import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mempool.torch.eager.mode import OffloadMode

#: Modes that offload storages now; set and cleared by the modes.
forking: weakref.WeakSet[OffloadMode] = weakref.WeakSet()


def _before_fork() -> None:
    for mode in list(forking):
        mode.transfers.lock.acquire()
        mode.transfers.wait_all()


def _after_fork(*, child: bool) -> None:
    for mode in list(forking):
        if child:
            mode.stop()
        mode.transfers.lock.release()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=functools.partial(_after_fork, child=False),
    after_in_child=functools.partial(_after_fork, child=True),
)

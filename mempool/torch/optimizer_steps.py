"""Listeners to every step of any optimizer.

PyTorch iterates over global hooks while calling them, and fails if a hook is added or removed meanwhile, for
example by a program's hook that calls `pool.step()` or closes the pool. So one pair of hooks is registered
once, permanently.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class Listener:
    """A listener to optimizer steps.

    Attributes:
        before: called with the optimizer that is about to step.
        after: called with the optimizer that has stepped.
    """

    def __init__(
        self,
        before: Callable[[torch.optim.Optimizer], None] | None = None,
        after: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> None:
        """Register the listener."""
        self.before, self.after = before, after
        with _lock:
            _register_once()
            LISTENERS.append(self)

    def remove(self) -> None:
        """Stop the calls; permitted within a call."""
        with _lock:
            if self in LISTENERS:
                LISTENERS.remove(self)


#: Registered listeners.
LISTENERS: list[Listener] = []
_lock = threading.RLock()
_registered: list[Any] = []


def _register_once() -> None:
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_begins))
        _registered.append(register_optimizer_step_post_hook(_ended))


def _begins(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for listener in tuple(LISTENERS):
        if listener.before is not None:
            listener.before(optimizer)


def _ended(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for listener in tuple(LISTENERS):
        if listener.after is not None:
            listener.after(optimizer)

"""Offloading while a program runs: tensors wait in host memory between their uses.

`mempool.torch.install` with ``limit`` starts an `OffloadSession`. The design is in docs/swapping.md.

The path from an operation to a copy: `mode` (a dispatch mode) and `operation_runner`, or `schedule_follower`
for an iteration that repeats -> `iterations` (the schedule) and `eviction_policy` -> `transfers` ->
`mempool.torch.offload.engine`. On a GPU, iterations that repeat make their moves in C++ (`native_moves`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from mempool.torch.eager.mode import UNDECIDED, OffloadMode
from mempool.torch.eager.relative_limit import RelativeLimit
from mempool.torch.offload.engines import create_engine
from mempool.torch.offload.host_memory import default_host_limit

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from mempool.pool import Pool


class OffloadSession:
    """Keeps a pool's memory within a limit, for the creating thread and that thread's backward passes.

    Attributes:
        mode: the dispatch mode.
    """

    def __init__(
        self, pool: Pool, device: torch.device, limit: int | str, on_iteration_end: Callable[[], None]
    ) -> None:
        """Start offloading; call `on_iteration_end` at the end of each iteration.

        A limit such as "80%" is decided when the first iteration ends.
        """
        host_bytes = pool.settings.host_limit or default_host_limit()
        self._engine = create_engine(device, host_bytes)
        self.mode = OffloadMode(
            self._engine,
            device,
            limit if isinstance(limit, int) else UNDECIDED,
            alignment=pool.device.alignment,
            host_bytes=host_bytes,
            client=pool.client,
            on_iteration_end=on_iteration_end,
            reset_plans=pool.planner.reset_plans,
        )
        if isinstance(limit, str):  # before the mode, whose listener ends the iteration
            self.mode.relative_limit = RelativeLimit(limit, pool.client, self.mode.decide_limit)
        self._process = os.getpid()
        self._ended = False
        self.mode.__enter__()
        self.mode.storages.pin_aliases()

    def begin(self) -> None:
        """Begin an iteration that the program marks; earlier operations belong to no iteration."""
        self.mode.begin()

    def require_marks(self) -> None:
        """End iterations at the program's marks only, no longer at optimizer steps."""
        self.mode.marked = True

    def mark(self) -> None:
        """End an iteration that the program marks."""
        self.mode.marked = True
        self.mode.step()

    def values(self) -> dict[str, Any]:
        """Return the report entries, with sizes in bytes."""
        return {**self.mode.values(), "host_bytes": self._engine.host_bytes}

    def cost(self) -> dict[str, Any] | None:
        """Return the limit and the present schedule's cost, for JSON; None without a schedule."""
        pattern, limit = self.mode.iterations.pattern, self.mode.limit_bytes
        if pattern is None or limit == UNDECIDED:
            return None
        planned = pattern.schedule.swap.limit_bytes <= pattern.limit_bytes
        cost = self.mode.iterations.planner.cost(pattern.schedule, max(limit - pattern.limit_bytes, 0))
        return {"limit_bytes": limit, "planned": planned, **cost}

    def end_at_exit(self) -> None:
        """End offloading in a process that exits, without exceeding the limit.

        On a GPU, offloaded storages stay on the host, and exit handlers reload them on demand. On the CPU,
        host and device share one memory, so all storages are reloaded: finalizers may use them while the
        interpreter shuts down, when PyTorch no longer calls dispatch modes.
        """
        if self.mode.storages.device == "cpu":
            self.end()
        elif not self._ended and self._process == os.getpid():
            self._ended = True
            self.mode.stop()

    def end(self) -> None:
        """Reload every storage and stop offloading; call this in the thread that works with tensors."""
        if self._ended or self._process != os.getpid():
            return  # a forked child goes on as is, with reloads on demand
        self._ended = True
        if self.mode.bypass is not None:
            self.mode.bypass.resume()
        if self.mode in _get_current_dispatch_mode_stack():
            _take_out(self.mode)
        else:  # called in another thread
            self.mode.end()
        self._engine.close()


def _take_out(mode: Any) -> None:
    """Exit a mode, even if other modes were entered later."""
    above = []
    while _get_current_dispatch_mode_stack()[-1] is not mode:
        above.append(_pop_mode())
    try:
        mode.__exit__(None, None, None)
    finally:
        for other in reversed(above):
            _push_mode(other)

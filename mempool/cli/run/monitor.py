"""Background thread of ``mempool run``: status line on the terminal, and samples of memory."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

from mempool.units import binary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mempool.reporting.memory_history import MemoryHistory

#: Seconds between two samples, and between two states of the status line.
SAMPLE_SECONDS, STATUS_SECONDS = 0.05, 1.0
#: Least reserved bytes of a pool in the status line.
LITTLE = 1 << 20


class Monitor:
    """Observer of a program's pools.

    Attributes:
        histories: sampled memory, by pool.
    """

    def __init__(self, pools: Mapping[str, Any], *, shows: bool, samples: bool) -> None:
        """Start the thread.

        Args:
            pools: pools by framework; the program may install more.
            shows: show a status line.
            samples: sample the memory.
        """
        self.histories: dict[str, MemoryHistory] = {}
        self._pools, self._samples = pools, samples
        self._line = StatusLine() if shows else None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mempool-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, add a last sample, and clear the status line."""
        self._end.set()
        self._thread.join()
        if self._samples:
            self._sample()
        if self._line is not None:
            self._line.clear()

    def _run(self) -> None:
        turns = round(STATUS_SECONDS / SAMPLE_SECONDS) if self._samples else 1
        turn = 0
        while not self._end.wait(STATUS_SECONDS / turns):
            turn += 1
            if self._samples:
                self._sample()
            if self._line is not None and turn % turns == 0 and (text := status(self._pools)):
                self._line.show(text)

    def _sample(self) -> None:
        from mempool.reporting.memory_history import MemoryHistory

        for pool in list(self._pools.values()):
            for one in (pool, *getattr(pool, "pools", {}).values()):
                if hasattr(one, "client"):
                    if one.name not in self.histories:
                        self.histories[one.name] = MemoryHistory(one)
                    self.histories[one.name].sample()


def status(pools: Mapping[str, Any]) -> str:
    """Return a line with the state of the pools that hold memory; empty without such pools."""
    each = []
    for name, pool in list(pools.items()):
        metrics = pool.metrics()
        if metrics["reserved_bytes"] < LITTLE:
            continue
        unit = "step" if metrics["steps"] else "period"
        count = f"{unit} {metrics[f'{unit}s']:,}, " if metrics[f"{unit}s"] else ""
        hits = f", {metrics['hit_rate']:.1%} at planned addresses" if metrics["planned_from"] else ""
        each.append(
            f"{name}: {count}{metrics['state']}{hits}, live "
            f"{binary(metrics['live_bytes'])}, reserved {binary(metrics['reserved_bytes'])}"
        )
    return "; ".join(each)


def terminal_shows_status() -> bool:
    """Return true if stderr is a terminal, controlled by this process, with a movable cursor."""
    return os.isatty(2) and os.environ.get("TERM", "dumb") != "dumb"


class StatusLine:
    """Status line in the last row of the terminal, below the scrolling output of the program."""

    def __init__(self) -> None:
        self._size: os.terminal_size | None = None  # of the terminal with a reserved row
        self._text = ""

    def show(self, text: str) -> None:
        """Replace the text, unless another job controls the terminal."""
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(2)
            if os.tcgetpgrp(2) != os.getpgrp() or size.lines < 4 or (text, size) == (self._text, self._size):
                return
            out = ""
            if size != self._size:  # scroll only the rows above
                out = f"\x1bD\x1b7\x1b[1;{size.lines - 1}r\x1b8\x1b[A"
            out += f"\x1b7\x1b[{size.lines};1H\x1b[2K\x1b[2m{text[: size.columns - 1]}\x1b8"
            os.write(2, out.encode(errors="replace"))
            self._text, self._size = text, size

    def clear(self) -> None:
        """Erase the row and return it to the terminal."""
        if self._size is not None:
            with contextlib.suppress(OSError):
                os.write(2, f"\x1b7\x1b[r\x1b[{self._size.lines};1H\x1b[2K\x1b8".encode())
            self._size = None

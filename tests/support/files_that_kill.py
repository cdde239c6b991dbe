"""Tasks for other processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def size_or_death(file: str) -> int:
    """The length of a name; the process dies of a name with "kill" in it."""
    if "kill" in file:
        os.kill(os.getpid(), signal.SIGKILL)
    if "bad" in file:
        raise ValueError(f"{file} is bad")
    return len(file)


def slow_size(file: str) -> int:
    """The length of a name, after a while."""
    time.sleep(0.3)
    return len(file)


def endless(file: str) -> int:
    """Says that it has begun, by making the file, and comes to no end."""
    with Path(file).open("x"):
        time.sleep(600)
    return 0

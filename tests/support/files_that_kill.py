"""Tasks for other processes."""

from __future__ import annotations

import os
import signal


def size_or_death(file: str) -> int:
    """The length of a name; the process dies of a name with "kill" in it."""
    if "kill" in file:
        os.kill(os.getpid(), signal.SIGKILL)
    if "bad" in file:
        raise ValueError(f"{file} is bad")
    return len(file)

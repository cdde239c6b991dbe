"""Tasks of worker processes."""

from __future__ import annotations

import os
import signal


def size_or_death(file: str) -> int:
    """Return the length of a name; kill the process if the name contains "kill"."""
    if "kill" in file:
        os.kill(os.getpid(), signal.SIGKILL)
    if "bad" in file:
        raise ValueError(f"{file} is bad")
    return len(file)

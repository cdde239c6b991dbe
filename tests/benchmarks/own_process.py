"""One run of a benchmark in a process of its own."""

from __future__ import annotations

import contextlib
import fcntl
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Seconds after which a run is given up.
PATIENCE = 900


def told(script: str, *arguments: Any) -> dict[str, Any]:
    """What a script says last, as JSON, when it is given ``--one ARGUMENTS``; or what went wrong."""
    command = [sys.executable, script, "--one", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]}
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Use the GPU alone: processes start and plan while another one is measured, and wait here for theirs."""
    with (Path(tempfile.gettempdir()) / "mempool-benchmark.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

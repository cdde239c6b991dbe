"""One run of a benchmark in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

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

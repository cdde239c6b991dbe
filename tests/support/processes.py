"""Scripts of the tests that run in processes of their own and say what came out."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def told_by(script: Path, *arguments: str) -> dict[str, Any]:
    """The JSON object of a script's last line; the script must end well."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said

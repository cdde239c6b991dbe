"""Shared cases: files outside the repository that show a fault of an earlier version, used as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parents[2] / "../shared/cases"


def shared_case(name: str) -> str:
    """Return the path of a case, or skip the test where there is none."""
    if not (CASES / name).exists():
        pytest.skip(f"{CASES / name} is not here")
    return str(CASES / name)


def run_case(name: str, renamed: dict[str, str] | None = None, before: str = "") -> str:
    """Run a script in a process of its own and return the printed text; none of its assertions fails.

    Args:
        name: file of the script.
        renamed: names of the script that have another name by now.
        before: code run first.
    """
    code = Path(shared_case(name)).read_text()
    for former, now in (renamed or {}).items():
        assert former in code
        code = code.replace(former, now)
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-c", f"{before}\n{code}"],
        capture_output=True, text=True, check=False, env={**os.environ, "PATH": tools},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout

"""Runs of programs under plain Python and under ``mempool run``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import textwrap
from dataclasses import dataclass
from pathlib import Path

COMMAND = str(Path(sysconfig.get_path("scripts"), "mempool"))
MEMPOOL = (COMMAND, "run")


@dataclass(frozen=True)
class Outcome:
    stdout: str
    stderr: str
    status: int


def start(
    folder: Path, *command: str, flags: tuple[str, ...] = (), **environment: str
) -> subprocess.Popen[str]:
    """Start plain Python in a folder, without this environment's PYTHONPATH and settings of the pool."""
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("MEMPOOL")}
    inherited["MEMPOOL_REMEMBER"] = "0"  # plans of earlier runs would change what is tested
    return subprocess.Popen(
        [sys.executable, *flags, *command],
        cwd=folder,
        env=inherited | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(process: subprocess.Popen[str], given: str = "") -> Outcome:
    """Return output, errors and status, without addresses, which differ between processes."""
    texts = (re.sub("0x[0-9a-f]+", "0x", text) for text in process.communicate(given, timeout=120))
    return Outcome(*texts, process.returncode)


def plain_and_pooled(
    folder: Path, *command: str, given: str = "", flags: tuple[str, ...] = (), **environment: str
) -> tuple[Outcome, Outcome]:
    """Return the outcomes of a command line under plain Python and under the pool."""
    plain = start(folder, *command, flags=flags, **environment)
    pooled = start(folder, *MEMPOOL, "--quiet", *command, flags=flags, **environment)
    return outcome(plain, given), outcome(pooled, given)


def write(path: Path, program: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(program))
    return path

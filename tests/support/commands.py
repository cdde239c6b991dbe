"""Programs under plain Python and under ``mempool run``, and what became of them."""

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
    """Plain Python in a folder; of this environment, PYTHONPATH and the pool's settings are left out."""
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
    """Output, errors and status; addresses are left out, they are different in every process."""
    texts = (re.sub("0x[0-9a-f]+", "0x", text) for text in process.communicate(given, timeout=120))
    return Outcome(*texts, process.returncode)


def both(
    folder: Path, *command: str, given: str = "", flags: tuple[str, ...] = (), **environment: str
) -> tuple[Outcome, Outcome]:
    """What plain Python and the pool make of the same command line."""
    plain = start(folder, *command, flags=flags, **environment)
    pooled = start(folder, *MEMPOOL, "--quiet", *command, flags=flags, **environment)
    return outcome(plain, given), outcome(pooled, given)


def write(path: Path, program: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(program))
    return path

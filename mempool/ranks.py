"""Processes that train together: each reads and writes files of its own."""

from __future__ import annotations

import os
import re
from pathlib import Path

#: In the name of a file, where the rank is to stand.
PLACEHOLDER = "{rank}"


def rank() -> int | None:
    """Which of several processes this is, as ``torchrun`` tells it; None: it is alone, or nobody says."""
    environment = os.environ
    number, size = environment.get("RANK") or environment.get("LOCAL_RANK"), environment.get("WORLD_SIZE")
    if number is None or size is None or not (number.isdecimal() and size.isdecimal()):
        return None
    return int(number) if int(size) > 1 else None


def own_file(path: str) -> str:
    """The file that this process writes for such a name: one of several has its rank in it.

    ``run.plan`` is ``run.rank1.plan``, unless the name says where the rank is to stand, as ``{rank}``, or has
    it already.
    """
    number = rank()
    if PLACEHOLDER in path:
        return path.replace(PLACEHOLDER, str(number or 0))
    file = Path(path)
    if number is None or re.search(rf"rank[-_]?{number}(?!\d)", file.name, re.IGNORECASE):
        return path
    if file.exists() and not file.is_file():  # a device, a pipe
        return path
    return str(file.with_name(f"{file.stem}.rank{number}{file.suffix}"))


def file_to_read(path: str) -> str:
    """The file of such a name that this process reads: its own, else the one that is there for all."""
    own = own_file(path)
    return own if PLACEHOLDER in path or Path(own).exists() else path

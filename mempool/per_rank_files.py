"""File names per rank: each process of a distributed training reads and writes separate files."""

from __future__ import annotations

import os
import re
from pathlib import Path

#: Placeholder of the rank in a file name.
PLACEHOLDER = "{rank}"


def rank() -> int | None:
    """Return the rank of this process as set by ``torchrun``; None if alone or unknown."""
    environment = os.environ
    number, size = environment.get("RANK") or environment.get("LOCAL_RANK"), environment.get("WORLD_SIZE")
    if number is None or size is None or not (number.isdecimal() and size.isdecimal()):
        return None
    return int(number) if int(size) > 1 else None


def own_file(path: str) -> str:
    """Return the file name that this process writes: with a rank, if there are several processes.

    ``run.plan`` becomes ``run.rank1.plan``, unless the name contains the placeholder ``{rank}`` or already
    the rank.
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
    """Return the file name that this process reads: the rank's own file if present, else the common one."""
    own = own_file(path)
    return own if PLACEHOLDER in path or Path(own).exists() else path

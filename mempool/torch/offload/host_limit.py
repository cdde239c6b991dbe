"""Limit of the host memory for copies."""

from __future__ import annotations

import os
from pathlib import Path

#: Files of a control group: the limit, the usage, and the key of the droppable file pages in memory.stat.
_GROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def default_host_limit(root: Path = Path("/")) -> int:
    """Return half of the host memory that is free now, in bytes."""
    return available_bytes(root) // 2


def available_bytes(root: Path = Path("/")) -> int:
    """Return the host memory that the system and the control groups leave to this process, in bytes.

    Args:
        root: root of the file system to read.
    """
    free = _counts(root / "proc/meminfo").get("MemAvailable")
    if free is None:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder in _groups(root):
        for limit, held, files in _GROUPS:
            most, now = _number(folder / limit), _number(folder / held)
            if most is not None and now is not None:
                free = min(free, most - now + _counts(folder / "memory.stat").get(files, 0))
    return max(free, 0)


def _groups(root: Path) -> list[Path]:
    """Return the folders of this process's control groups and of all parent groups."""
    top = root / "sys/fs/cgroup"
    found = {top, top / "memory"}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers in ("", "memory"):
            folder = top / controllers / path.strip("/")
            found |= {folder, *(one for one in folder.parents if one.is_relative_to(top))}
    return sorted(found)


def _counts(path: Path) -> dict[str, int]:
    """Read numbers by name, in bytes: lines of ``name 12`` or ``name: 12 kB``."""
    rows = [line.replace(":", " ").split() for line in _lines(path)]
    return {
        row[0]: int(row[1]) << (10 if row[2:] == ["kB"] else 0)
        for row in rows
        if len(row) > 1 and row[1].isdigit()
    }


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None

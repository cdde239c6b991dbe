"""Files that a rehearsal leaves as they are, by a library in front of the C library.

In all of a program's processes, ``libmempool_files.so`` redirects into a folder what would write, remove or
rename files from before the rehearsal, and the content of new files below the current folder and of new
checkpoints anywhere. A journal in the folder lists the changes. New files exist in their place, but empty,
and are removed at the end of the rehearsal.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mempool.cache_folder import cache_folder
from mempool.rehearsal.standin import LIBRARY as STANDIN

if TYPE_CHECKING:
    from collections.abc import Collection

LIBRARY = STANDIN.with_name("libmempool_files.so")
_FOLDER = "files"


class KeptFiles(NamedTuple):
    """Files that a program would have changed."""

    written: list[str]  #: files that were written elsewhere
    not_removed: list[str]  #: older files and folders; a folder without its content
    left: list[str]  #: new folders that stay, as others wrote files there


def environment(folder: Path, began_ns: int) -> dict[str, str]:
    """Return the environment of a process that changes no older file and leaves no new one.

    Args:
        folder: a temporary folder, for the library under a path without spaces, and for redirected files.
        began_ns: time since the epoch from which files are new.
    """
    library = folder / LIBRARY.name
    library.symlink_to(LIBRARY)
    current, cache = os.getcwd(), "-"  # noqa: PTH109
    with contextlib.suppress(OSError, RuntimeError):
        cache = str(cache_folder())
    if _is_below(current + os.sep, cache):
        cache = "-"
    return {
        "LD_PRELOAD": ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD")))),
        "MEMPOOL_FILES": f"{folder / _FOLDER}\n{began_ns}\n{cache}\n{current}",
    }


def finish(folder: Path) -> KeptFiles:
    """Remove the empty new files and folders of a rehearsal that has ended; return the program's changes.

    Changes of older caches and temporary files are left out.
    """
    written, removed, made = _read_journal(folder / _FOLDER / "journal")
    left: list[str] = []
    for name in sorted(made, reverse=True):  # files before their folders
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = os.lstat(name)
            identity = f"{os.major(status.st_dev):x}-{os.minor(status.st_dev):x}-{status.st_ino:x}"
            file = stat.S_ISREG(status.st_mode)
            if identity != made[name].rpartition("-")[0] or (file and status.st_size):
                continue  # another's
            try:
                (os.rmdir if stat.S_ISDIR(status.st_mode) else os.unlink)(name)
            except OSError:
                left.append(name)
            if file:
                written[name] = None
    return KeptFiles([*map(_shown, written)], [*map(_shown, _outermost(removed))], _outermost(left))


def _read_journal(path: Path) -> tuple[dict[str, None], dict[str, None], dict[str, str]]:
    """Return the files written elsewhere, those not removed, and the device and inode of new ones by path."""
    written, removed = dict[str, None](), dict[str, None]()
    made: dict[str, str] = {}
    fields = os.fsdecode(path.read_bytes()).split("\0") if path.exists() else []
    for kind, first, last in zip(fields[::3], fields[1::3], fields[2::3], strict=False):
        if kind == "made":
            made[last] = first
        elif kind == "renamed":
            for name in [name for name in made if name == first or _is_below(name, first)]:
                made[last + name[len(first) :]] = made.pop(name)
        elif not _is_unimportant(last):
            (written if kind == "written" else removed)[last] = None
    return written, removed, made


def _outermost(names: Collection[str]) -> list[str]:
    return sorted(name for name in names if not any(_is_below(name, other) for other in names))


def _is_below(name: str, folder: str) -> bool:
    return name.startswith(folder.rstrip(os.sep) + os.sep)


def _is_unimportant(name: str) -> bool:
    """Return true for the path of a cache or a temporary file."""
    shown = _shown(name)
    return any(part.startswith(".") for part in Path(shown).parts) or _is_below(shown, tempfile.gettempdir())


def _shown(name: str) -> str:
    """Return a path as reports name it: relative in the current folder."""
    return os.path.relpath(name) if _is_below(name, os.getcwd()) else name  # noqa: PTH109

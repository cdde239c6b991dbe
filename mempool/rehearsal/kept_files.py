"""Files from before a rehearsal, which a library in front of the C library keeps as they are.

In all of a program's processes, ``libmempool_files.so`` redirects into a folder what would write, remove or
rename such files, and lists them there.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from mempool.cache_folder import cache_folder
from mempool.rehearsal.standin import LIBRARY as STANDIN

LIBRARY = STANDIN.with_name("libmempool_files.so")
_FOLDER = "files"


def environment(folder: Path, began_ns: int) -> dict[str, str]:
    """Return the environment of a process that changes no older file.

    Args:
        folder: a temporary folder, for the library under a path without spaces, and for redirected files.
        began_ns: time since the epoch from which files may be changed.
    """
    library = folder / LIBRARY.name
    library.symlink_to(LIBRARY)
    exempt = ""
    with contextlib.suppress(OSError, RuntimeError):
        exempt = str(cache_folder())
    return {
        "LD_PRELOAD": ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD")))),
        "MEMPOOL_FILES_FOLDER": str(folder / _FOLDER),
        "MEMPOOL_FILES_BEGAN": str(began_ns),
        "MEMPOOL_FILES_EXEMPT": exempt,
    }


def kept(folder: Path) -> tuple[list[str], list[str]]:
    """Return the files that were written elsewhere, and those that were not removed.

    Caches and temporary files are left out, and what is in a folder that was not removed either.
    """
    written: dict[str, None] = {}
    removed: dict[str, None] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / _FOLDER / "journal").read_text("utf-8", "surrogateescape").splitlines():
            if (name := _shown(line[1:])) is not None:
                (written if line[0] == "w" else removed).setdefault(name)
    return list(written), [name for name in removed if not any(map(removed.__contains__, _parents(name)))]


def _parents(name: str) -> list[str]:
    return [str(parent) for parent in Path(name).parents]


def _shown(path: str) -> str | None:
    """Return the path of a file as reports name it, or None for a cache or a temporary file."""
    name = os.path.normpath(path)
    below = name.startswith(os.getcwd().rstrip(os.sep) + os.sep)  # noqa: PTH109
    name = os.path.relpath(name) if below else name
    temporary = not below and name.startswith(tempfile.gettempdir() + os.sep)
    return None if temporary or any(part.startswith(".") for part in Path(name).parts) else name

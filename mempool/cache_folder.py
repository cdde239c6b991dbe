"""Folder for files that later processes reuse.

It is ``$MEMPOOL_CACHE``, else ``$XDG_CACHE_HOME/mempool``, else ``~/.cache/mempool``. A relative path counts
from the working folder at the import of `mempool`, since the program may change its folder later.
"""

from __future__ import annotations

import os
from pathlib import Path


def _working_folder() -> Path:
    try:
        return Path.cwd()
    except OSError:  # removed: `cache_folder` fails for a relative path
        return Path()


_BEGAN = _working_folder()


def cache_folder() -> Path:
    """Return the folder; create it if missing.

    Raises:
        OSError, RuntimeError: the folder cannot be made, or the user has no home folder.
    """
    chosen, cache = os.environ.get("MEMPOOL_CACHE"), os.environ.get("XDG_CACHE_HOME")
    home = Path(cache) if cache else Path("~/.cache").expanduser()
    folder = (_BEGAN / (Path(chosen) if chosen else home / "mempool")).absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder

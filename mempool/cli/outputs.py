"""Whether an output can be written, and would take the place of what is read; the standard library only."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def why_not(path: Path) -> str | None:
    """Why no file can be put there, or None. Tried out: neither modes nor names tell it everywhere."""
    try:
        target = Path(os.path.realpath(path))
        if target.is_symlink():
            return os.strerror(errno.ELOOP)
        mode = target.stat().st_mode if target.exists() else None
        if mode is not None and not stat.S_ISREG(mode):
            if stat.S_ISDIR(mode):
                return os.strerror(errno.EISDIR)
            return None if os.access(target, os.W_OK) else os.strerror(errno.EACCES)
        beside = target.with_name(f".{os.urandom(8).hex()}.tmp")
        os.close(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        beside.unlink()
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # a null in the name
        return str(error)
    return None


def written_over(kept: Iterable[Path], outputs: Iterable[Path | None]) -> Path | None:
    """An output that would take the place of what is to be kept, or of another output.

    Devices and pipes take nobody's place.
    """
    taken = {os.path.realpath(path) for path in kept}
    for output in outputs:
        if output is None or (output.exists() and not output.is_file()):
            continue
        place = os.path.realpath(output)
        if place in taken:
            return output
        taken.add(place)
    return None

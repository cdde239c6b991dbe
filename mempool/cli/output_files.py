"""Checks that outputs can be written and overwrite no input; uses the standard library only."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def write_obstacle(path: Path) -> str | None:
    """Return the reason why no file can be written at a path, or None.

    The function creates a file as a test, since modes and names are not reliable.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.is_symlink():
            return os.strerror(errno.ELOOP)
        mode = target.stat().st_mode if target.exists() else None
        if mode is not None and not stat.S_ISREG(mode):
            if stat.S_ISDIR(mode):
                return os.strerror(errno.EISDIR)
            return None if os.access(target, os.W_OK) else os.strerror(errno.EACCES)
        temporary = target.with_name(f".{os.urandom(8).hex()}.tmp")
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        temporary.unlink()
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # a null character
        return str(error)
    return None


def overwritten_file(inputs: Iterable[Path], outputs: Iterable[Path | None]) -> Path | None:
    """Return an output that would overwrite an input or another output; None if there is none.

    Devices and pipes overwrite nothing.
    """
    taken = {os.path.realpath(path) for path in inputs}
    for output in outputs:
        if output is None or (output.exists() and not output.is_file()):
            continue
        real = os.path.realpath(output)
        if real in taken:
            return output
        taken.add(real)
    return None

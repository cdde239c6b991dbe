"""Plans that the next run of the same program follows, in files of the cache folder.

A run looks for the plans of the same program, pool and arguments, else for the newest plans of the same
program and pool. Plans that the program does not follow take no arena, so a wrong file does no harm.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mempool.cache_folder import cache_folder
from mempool.logs import log

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from mempool.planning.plan_files import SavedPlans


@dataclass(frozen=True)
class RememberedPlansOptions:
    """Bounds of the files kept.

    Attributes:
        max_files: plans of so many programs, pools and command lines: a year of work for most users.
        max_bytes: bytes of all files together; the plan of a large training has about one megabyte.
    """

    max_files: int = 256
    max_bytes: int = 256 << 20


OPTIONS = RememberedPlansOptions()


class RememberedPlans:
    """The file of one pool of this process's program.

    Attributes:
        path: the file that this run writes.
    """

    def __init__(self, folder: Path, program: str, pool: str, arguments: Sequence[str]) -> None:
        """Name the file; nothing is read or written.

        Args:
            folder: the cache folder.
            program: the program, such as the path of the script.
            pool: the pool: framework, device and rank.
            arguments: the program's command line.
        """
        self._pool = _digest([pool])
        self._folder = folder / "plans"
        self._program = _digest([program])
        self.path = self._folder / f"{self._program}-{self._pool}-{_digest(arguments)}.plan"

    def read(self) -> SavedPlans | None:
        """Return the plans of an earlier run; None if there are none. A damaged file is deleted."""
        from mempool.planning.plan_files import read_plans_in_subprocess
        from solvers import PlanError
        from traces import TraceError

        found = self._newest()
        if found is None:
            return None
        try:
            plans = read_plans_in_subprocess(str(found))
            found.touch()
        except (PlanError, TraceError, ValueError):
            log.warning("the remembered plan %s is damaged and was deleted", found)
            found.unlink(missing_ok=True)
            return None
        except OSError as error:
            log.info("no remembered plan: %s", error)
            return None
        log.info("following the plan of an earlier run, if the program does: %s", found)
        return dataclasses.replace(plans, remembered=True)

    def write(self, plans: SavedPlans, *, made_with: str) -> None:
        """Keep the plans for the next run, and delete the files that were not used for longest."""
        from mempool.planning.plan_files import write_plans_in_subprocess

        partial = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            write_plans_in_subprocess(plans, str(partial), made_with=made_with)
            partial.replace(self.path)
            _prune(self._folder.glob("*.plan"), keep=self.path)
        except OSError as error:
            log.info("the plan is not remembered: %s", error)
            partial.unlink(missing_ok=True)

    def _newest(self) -> Path | None:
        if self.path.exists():
            return self.path
        others = _ages(self._folder.glob(f"{self._program}-{self._pool}-*.plan"))
        return max(others)[2] if others else None


def remembered_plans(pool: str) -> RememberedPlans | None:
    """Return the remembered plans of a pool; None if the program has no name or there is no cache folder.

    Args:
        pool: the pool: framework, device and rank.
    """
    program = _program()
    if program is None:
        return None
    try:
        folder = cache_folder()
    except (OSError, RuntimeError) as error:
        log.info("no plan is remembered: %s", error)
        return None
    return RememberedPlans(folder, program, pool, sys.argv[1:])


def _program() -> str | None:
    """Return the path of the script or module, or the code after ``-c``; None in notebooks and children."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        return None
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if isinstance(file, str):
        return os.path.realpath(file)
    arguments = sys.orig_argv
    return arguments[arguments.index("-c") + 1] if "-c" in arguments[:-1] else None


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogateescape")).hexdigest()[:16]


def _ages(paths: Iterable[Path]) -> list[tuple[float, int, Path]]:
    """Return the (modification time, bytes, path) of each file that is still there."""
    found = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:  # deleted by another process
            continue
        found.append((status.st_mtime, status.st_size, path))
    return found


def _prune(paths: Iterable[Path], *, keep: Path) -> None:
    files = sorted(_ages(paths), reverse=True)
    total = 0
    for number, (_, size, path) in enumerate(files):
        total += size
        if path != keep and (number >= OPTIONS.max_files or total > OPTIONS.max_bytes):
            path.unlink(missing_ok=True)

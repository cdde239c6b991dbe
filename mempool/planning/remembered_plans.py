"""Plans that are kept in the cache folder for the next run of the same program.

A run looks for the plans of the same program, pool and arguments, else for the newest plans of the same
program and pool. An unused plan takes no arena, so a wrong file is harmless.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mempool.cache_folder import cache_folder
from mempool.logs import log
from mempool.python_options import python_options

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from mempool.planning.plan_files import SavedPlans


@dataclass(frozen=True)
class RememberedPlansOptions:
    """Bounds of the files kept.

    Attributes:
        max_files: number of files, one per program, pool and command line: a year of work for most users.
        max_bytes: bytes of all files together; the plan of a large training has about one megabyte.
        min_seconds: shortest run, in seconds, whose plan is kept without a request: writing and reading a
            file takes half a second.
    """

    max_files: int = 256
    max_bytes: int = 256 << 20
    min_seconds: float = 5.0


OPTIONS = RememberedPlansOptions()


class RememberedPlans:
    """The file of one pool of this process's program.

    Attributes:
        path: the file that this run writes.
    """

    def __init__(self, folder: Path, program: str, pool: str, arguments: Sequence[str]) -> None:
        """Choose the file's name, without access to the file.

        Args:
            folder: the cache folder.
            program: the program, such as the path of the script.
            pool: the pool: framework, device and rank.
            arguments: the program's command line.
        """
        self._began = time.monotonic()
        self._pool = _digest([pool])
        self._folder = folder / "plans"
        self._program = _digest([program])
        self.path = self._folder / f"{self._program}-{self._pool}-{_digest(arguments)}.plan"

    def is_long_ago(self) -> bool:
        """Return true if this run is long enough to keep its plan."""
        return time.monotonic() - self._began >= OPTIONS.min_seconds

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
        except (PlanError, TraceError, ValueError):
            log.warning("the remembered plan %s is damaged and is deleted", found)
            with contextlib.suppress(OSError):  # a read-only folder
                found.unlink(missing_ok=True)
            return None
        except OSError as error:
            log.info("no remembered plan: %s", error)
            return None
        with contextlib.suppress(OSError):  # a read-only folder
            found.touch()
        log.info("following the plan of an earlier run, if the program does: %s", found)
        return dataclasses.replace(plans, remembered=True)

    def write(self, plans: SavedPlans, *, made_with: str) -> None:
        """Write the plans for the next run, and delete the least recently used files."""
        from mempool.planning.plan_files import write_plans_in_subprocess

        partial = self.path.with_suffix(f".{os.getpid()}.part")
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            write_plans_in_subprocess(plans, str(partial), made_with=made_with)
            partial.replace(self.path)
            _prune(self._folder.iterdir(), keep=self.path)  # partial files of killed processes, too
        except OSError as error:
            log.info("the plan is not remembered: %s", error)
            with contextlib.suppress(OSError):  # a read-only folder
                partial.unlink(missing_ok=True)

    def _newest(self) -> Path | None:
        if self.path.is_file():
            return self.path
        files = self._folder.glob(f"{self._program}-{self._pool}-*.plan")
        others = _file_ages(path for path in files if path.is_file())
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
    return RememberedPlans(folder, program, pool, [str(argument) for argument in sys.argv[1:]])


def _program() -> str | None:
    """Return the path of the script or module, else the module after ``-m``, else the code after ``-c``.

    Return None in notebooks, in programs from standard input and in children of multiprocessing.
    """
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        return None
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if isinstance(file, str) and file != "<stdin>":
        return os.path.realpath(file)
    flag, value = next((given for given in python_options(sys.orig_argv[1:]) if given[0] in "cm"), ("", None))
    if value is None:
        return None
    if flag == "c":  # a child of multiprocessing imports the script before `parent_process` is set
        return None if value.startswith("from multiprocessing.") else value
    if sys.argv[:1] != ["-m"]:  # a notebook
        return None
    package = sys.modules.get(value.partition(".")[0])  # the package is imported before its module
    return f"{getattr(package, '__file__', None)} -m {value}"


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode(errors="surrogateescape")).hexdigest()[:16]


def _file_ages(paths: Iterable[Path]) -> list[tuple[float, int, Path]]:
    """Return the (modification time, bytes, path) of each file that still exists."""
    found = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:  # deleted by another process
            continue
        found.append((status.st_mtime, status.st_size, path))
    return found


def _prune(paths: Iterable[Path], *, keep: Path) -> None:
    files = sorted(_file_ages(paths), reverse=True)
    total = 0
    for number, (_, size, path) in enumerate(files):
        total += size
        if path != keep and (number >= OPTIONS.max_files or total > OPTIONS.max_bytes):
            path.unlink(missing_ok=True)

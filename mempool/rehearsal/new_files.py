"""Redirection of the new files of a rehearsal that comes before a run, so that the run finds none of them.

Files below the program's folder go to the rehearsal's folder. They are not written in their place and removed
later, because another process may write to them meanwhile. A folder is made in its place, because code of
libraries may write there, and is removed after the rehearsal if it is empty; a symbolic link likewise.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import stat
import tempfile
from typing import TYPE_CHECKING, Any

from mempool.cache_folder import cache_folder
from mempool.rehearsal.checkpoints import Redirection

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_JOURNAL = "made.jsonl"  #: file with the path, device and inode of each folder and link
#: Bytes up to which a file that the program appends to is copied first.
_MOST_COPIED = 1 << 30
_open = io.open


class NewFiles(Redirection):
    """Redirection of all files below the program's folder, and a journal of the folders and links made there.

    Not redirected are files in hidden folders from before the rehearsal, such as caches, and temporary files.
    """

    def __init__(self, folder: Path, redirected: list[str], *, journal: Path) -> None:
        """Redirect nothing yet: see `Redirection`; `journal`: folder for the journal."""
        super().__init__(folder, redirected)
        self._journal = journal / _JOURNAL
        self._start = os.getcwd()  # noqa: PTH109
        self._made: set[str] = set()
        self._count = 0  # of the places so far
        self._others = [str(journal), os.path.abspath(tempfile.gettempdir())]  # noqa: PTH100
        with contextlib.suppress(OSError, RuntimeError):
            self._others.append(str(cache_folder()))
        start = self._start
        self._others = [other for other in self._others if start != other and not _is_below(start, other)]

    def _is_ours(self, name: str) -> bool:
        """Return true if the rehearsal leaves nothing at this absolute path."""
        if not _is_below(name, self._start) or any(_is_below(name, other) for other in self._others):
            return False
        at = name.find(os.sep + ".", len(self._start))
        hidden = name[: name.find(os.sep, at + 1)] if at >= 0 and os.sep in name[at + 1 :] else ""
        return hidden == "" or hidden in self._made or not os.path.isdir(hidden)  # noqa: PTH112

    def _is_new(self, name: str) -> bool:
        return not os.path.lexists(name) and os.path.isdir(os.path.dirname(name))  # noqa: PTH112, PTH120

    def _place(self, name: str) -> Path:
        """Return a place of its own, since a file keeps its place when it gets another name."""
        self._count += 1
        return self._folder / f"{os.getpid()}-{self._count}-{os.path.basename(name)}"  # noqa: PTH119

    def _place_of_others(self, _: str) -> None:
        """Find no file of another process."""

    def matters(self, path: Path, mode: str) -> bool:
        """Return true for any file that the rehearsal would make or change in the program's folder."""
        name = os.path.abspath(path)  # noqa: PTH100
        if super().matters(path, mode) or name in self._places:
            return True
        if not self._is_ours(name):
            return False
        if self._is_new(name):
            return any(letter in mode for letter in "wax")
        if not path.is_file() or path.stat().st_size > _MOST_COPIED:
            return False
        with _open(name, "rb") as source, _open(self.moved(path), "wb") as target:
            shutil.copyfileobj(source, target)
        return True

    def patch_files(self) -> None:
        """Patch also what makes folders, links, and files by number."""
        super().patch_files()
        self._patch(os, "open", self._opening_by_flags(os.open))
        self._patch(os, "mkdir", self._noting(os.mkdir, 0))
        self._patch(os, "symlink", self._noting(os.symlink, 1))
        for name in ("rename", "replace"):
            self._patch(os, name, self._moving(getattr(os, name)))
        self._patch(shutil, "rmtree", self._dropping(shutil.rmtree))

    def _opening_by_flags(self, function: Any) -> Any:
        @functools.wraps(function)
        def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> Any:
            if dir_fd is None and isinstance(path, (str, os.PathLike)):
                name = os.path.abspath(os.fspath(path))  # noqa: PTH100
                makes = flags & os.O_CREAT and self._is_ours(name) and self._is_new(name)
                path = self.moved(path) if makes else self.known(path)
            return function(path, flags, mode, dir_fd=dir_fd)

        return call

    def _noting(self, function: Any, position: int) -> Any:
        """Note the path that a function makes, whose path is the argument at a position."""

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            if options.get("dir_fd") is None and len(args) > position:
                self._note(os.path.abspath(os.fsdecode(args[position])))  # noqa: PTH100
            return result

        return call

    def _note(self, name: str) -> None:
        if not self._is_ours(name):
            return
        status = os.lstat(name)
        with _open(self._journal, "a") as file:
            file.write(json.dumps([name, status.st_dev, status.st_ino]) + "\n")
        self._made.add(name)

    def _moving(self, function: Any) -> Any:
        """Rename redirected files, also those in a folder that gets another name."""

        @functools.wraps(function)
        def call(source: Any, target: Any, **options: Any) -> Any:
            if options or isinstance(source, bytes) or isinstance(target, bytes):
                return function(source, target, **options)
            before, after = (os.path.abspath(os.fspath(path)) for path in (source, target))  # noqa: PTH100
            if before in self._places:
                self._places[after] = self._places.pop(before)
                return None
            function(source, target)
            for name in [name for name in self._places if _is_below(name, before)]:
                self._places[after + name[len(before) :]] = self._places.pop(name)
            for name in sorted(name for name in self._made if _is_below(name, before)):
                self._made.discard(name)
                self._note(after + name[len(before) :])
            return None

        return call

    def _dropping(self, function: Callable[..., Any]) -> Any:
        """Forget the redirected files of a folder that is removed."""

        @functools.wraps(function)
        def call(path: Any, *args: Any, **options: Any) -> Any:
            result = function(path, *args, **options)
            folder = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
            if not os.path.lexists(folder):
                for name in [name for name in self._places if _is_below(name, folder)]:
                    del self._places[name]
            return result

        return call


def remove_new_folders(journal: Path) -> list[str]:
    """Remove the empty folders and the links of a rehearsal that has ended; return the folders that stay."""
    stay: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        for line in reversed((journal / _JOURNAL).read_text("utf-8").splitlines()):
            name, device, inode = json.loads(line)
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(name)
                if (status.st_dev, status.st_ino) != (device, inode):
                    continue
                try:
                    (os.unlink if stat.S_ISLNK(status.st_mode) else os.rmdir)(name)
                except OSError:
                    stay.append(name)
    return sorted(name for name in stay if not any(_is_below(name, other) for other in stay))


def _is_below(name: str, folder: str) -> bool:
    """Return true if an absolute path lies in a folder."""
    return name.startswith(folder.rstrip(os.sep) + os.sep)

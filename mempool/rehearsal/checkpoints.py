"""Redirection of a rehearsed program's checkpoints to a folder of the rehearsal."""

from __future__ import annotations

import builtins
import concurrent.futures
import functools
import hashlib
import io
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
_SAVER, _LOADER = (f"torch.distributed.checkpoint.state_dict_{name}" for name in ("saver", "loader"))
#: Modules after whose import `Redirection.patch_distributed` is called.
MODULES = (_SAVER, _LOADER)
_lstat = os.lstat  # the original function
#: Bytes of tensors from which a checkpoint is not written at all.
_TOO_LARGE = 1 << 30


class Redirection:
    """Redirection of checkpoints, and of writes over older files, to a folder, for writes and reads.

    The redirected path follows from the original path, so that other processes of the program find the file.
    Files from before the rehearsal are not removed.
    """

    def __init__(self, folder: Path, redirected: list[str], notes: list[str]) -> None:
        """Create the redirection without patches.

        Args:
            folder: the folder, created on first use.
            redirected: list that receives the program's path of each file.
            notes: list that receives a sentence for each path that the program tried to remove.
        """
        self._folder, self._redirected, self._notes = folder, redirected, notes
        self._places: dict[str, Path] = {}  # of redirected files, by absolute path as the program names them
        self._began = time.time()
        self._replaced: list[tuple[Any, str, Any]] = []
        self._old: set[str] = set()  # absolute paths of files from before the rehearsal
        self._distributed: set[str] = set()  # names of distributed checkpoints (not written)

    def moved(self, path: Any) -> Any:
        """Return the redirected path of a file that the program writes."""
        name = os.path.abspath(os.fspath(path))  # noqa: PTH100
        if os.path.dirname(name) == os.fspath(self._folder):  # noqa: PTH120
            return path  # a place: a copy of a redirected file opens it
        if name not in self._places:
            self._folder.mkdir(exist_ok=True)
            self._places[name] = self._place(name)
            self._redirected.append(os.fspath(path))
        return self._places[name]

    def known(self, path: Any) -> Any:
        """Return the redirected path of a file, or the path itself."""
        if not isinstance(path, (str, os.PathLike)):
            return path
        name = os.path.abspath(os.fspath(path))  # noqa: PTH100
        return self._places.get(name) or self._place_of_others(name) or path

    def _place(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}-{Path(name).name}"

    def _place_of_others(self, name: str) -> Path | None:
        """Return the redirected path of a file that another process wrote, or None."""
        try:
            _lstat(self._folder)
            place = self._place(name)
            _lstat(place)
        except OSError:
            return None
        return place

    def matters(self, path: Path, mode: str) -> bool:
        """Return true if opening this file in this mode must be redirected."""
        return self._endangers(path, mode)

    def _endangers(self, path: Path, mode: str) -> bool:
        """Return true for checkpoints, and for older files in the program's folder."""
        if path.suffix in _SUFFIXES:
            return True
        if not path.is_file() or not path.absolute().is_relative_to(Path.cwd()):
            return False
        name = os.path.abspath(path)  # noqa: PTH100
        if name in self._old or _is_old(path, self._began):
            self._old.add(name)  # later writes may overwrite it
            return "w" in mode
        return False

    def patch_torch(self) -> None:
        """Patch the functions by which PyTorch and safetensors write and read checkpoints."""
        import torch

        torch.save = _with_path(torch.save, 1, "f", self.moved, skip="obj")
        torch.load = _with_path(torch.load, 0, "f", self.known)
        try:
            import safetensors.torch as safetensors
        except ImportError:
            return
        safetensors.save_file = _with_path(safetensors.save_file, 1, "filename", self.moved, skip="tensors")
        safetensors.load_file = _with_path(safetensors.load_file, 0, "filename", self.known)

    def patch_distributed(self, name: str) -> None:
        """Patch an imported module to skip writes and reads of distributed checkpoints."""
        module: Any = sys.modules[name]
        if name == _SAVER:
            module.save = self._skipping(module.save, None)
            module.async_save = self._skipping(module.async_save, _done())
        else:
            module.load = self._reading(module.load)

    def _skipping(self, function: Any, result: Any) -> Any:
        @functools.wraps(function)
        def call(*_: Any, checkpoint_id: Any = None, storage_writer: Any = None, **__: Any) -> Any:
            name = _checkpoint_name(checkpoint_id, storage_writer)
            if name not in self._distributed:
                self._distributed.add(name)
                self._redirected.append(name)
            return result

        return call

    def _reading(self, function: Any) -> Any:
        @functools.wraps(function)
        def call(
            state: Any, *args: Any, checkpoint_id: Any = None, storage_reader: Any = None, **options: Any
        ) -> Any:
            if _checkpoint_name(checkpoint_id, storage_reader) in self._distributed:
                return None  # values would be zero
            options |= {"checkpoint_id": checkpoint_id, "storage_reader": storage_reader}
            return function(state, *args, **options)

        return call

    def patch_files(self) -> None:
        """Patch Python's functions that open, rename, copy, remove and query files."""
        opening = self._opening(builtins.open)
        for module in (builtins, io):
            self._patch(module, "open", opening)
        for name in ("stat", "lstat", "access", "chmod", "utime", "truncate"):
            self._patch(os, name, self._knowing(getattr(os, name)))
        for module, name in ((os, "remove"), (os, "unlink"), (shutil, "rmtree")):
            self._patch(module, name, self._keeping(getattr(module, name)))
        # A checkpoint with a temporary name is later renamed or copied.
        for module, name in (
            (os, "replace"),
            (os, "rename"),
            (shutil, "move"),
            (shutil, "copy"),
            (shutil, "copyfile"),
        ):
            self._patch(module, name, self._renaming(getattr(module, name)))

    def _patch(self, module: Any, name: str, function: Any) -> None:
        for functions in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks):
            if getattr(module, name) in functions:
                functions.add(function)
        self._replaced.append((module, name, getattr(module, name)))
        setattr(module, name, function)

    def restore_files(self) -> None:
        """Restore the functions that `patch_files` replaced."""
        while self._replaced:
            setattr(*self._replaced.pop())

    def _opening(self, function: Any) -> Any:
        @functools.wraps(function)
        def call(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if isinstance(path, (str, os.PathLike)):
                writes = any(letter in mode for letter in "wax+")
                path = self.moved(path) if writes and self.matters(Path(path), mode) else self.known(path)
            return function(path, mode, *args, **options)

        return call

    def _knowing(self, function: Any) -> Any:
        @functools.wraps(function)
        def call(path: Any, *args: Any, **options: Any) -> Any:
            known = path if options.get("dir_fd") is not None else self.known(path)
            return function(known, *args, **options)

        return call

    def _keeping(self, function: Any) -> Any:
        @functools.wraps(function)
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if options.get("dir_fd") is not None:
                return function(path, *args, **options)
            if isinstance(path, (str, os.PathLike)) and not options and _is_old(Path(path), self._began):
                note = f"{os.fspath(path)} was not removed"
                if note not in self._notes:
                    self._notes.append(note)
                return None
            return function(self.known(path), *args, **options)

        return call

    def _renaming(self, function: Any) -> Any:
        """Also redirect renames over an older file."""
        move = shutil.move if function in (os.replace, os.rename) else function  # may go to another disk

        @functools.wraps(function)
        def call(source: Any, target: Any, *args: Any, **options: Any) -> Any:
            place = self.known(source)
            if place is source:
                path = isinstance(target, (str, os.PathLike)) and not options and os.path.isfile(source)  # noqa: PTH113
                kept = self.moved(target) if path and self._endangers(Path(target), "w") else target
                return (function if kept is target else move)(source, kept, *args, **options)
            name = os.path.abspath(os.fspath(target))  # noqa: PTH100
            self._places[name] = self._place(name)
            function(place, self._places[name], *args, **options)
            written, final = os.fspath(source), os.fspath(target)
            if written in self._redirected and not place.exists():
                self._redirected.remove(written)
            if final not in self._redirected:
                self._redirected.append(final)
            return target

        return call


def _with_path(
    function: Callable[..., Any],
    position: int,
    name: str,
    move: Callable[[Any], Any],
    *,
    skip: str = "",
) -> Callable[..., Any]:
    """Wrap a function to use the redirected path.

    With ``skip``, the name of its first argument, the function does nothing if that argument has too many
    bytes.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        path = args[position] if len(args) > position else options.get(name)
        if not isinstance(path, (str, os.PathLike)):
            return function(*args, **options)
        path = move(path)
        if skip and _bytes(args[0] if args else options.get(skip)) > _TOO_LARGE:
            return None
        if len(args) > position:
            return function(*args[:position], path, *args[position + 1 :], **options)
        return function(*args, **options | {name: path})

    return call


def _checkpoint_name(name: Any, storage: Any) -> str:
    """Return the folder of a distributed checkpoint from a name, a writer or a reader."""
    return os.fspath(getattr(storage, "path", "") if name is None else name)


def _done() -> concurrent.futures.Future[None]:
    """Return a future that is done."""
    future = concurrent.futures.Future[None]()
    future.set_result(None)
    return future


def _bytes(value: Any) -> int:
    """Return the bytes of all tensors in nested containers."""
    import torch
    from torch.utils._pytree import tree_leaves

    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _is_old(path: Path, began: float) -> bool:
    """Return true if a file, or any file in a folder, was written before a time in seconds."""
    if not path.absolute().is_relative_to(Path.cwd()) and path.suffix not in _SUFFIXES:
        return False
    files = path.rglob("*") if path.is_dir() else [path]
    return any(file.is_file() and file.stat().st_mtime < began for file in files)

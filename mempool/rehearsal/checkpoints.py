"""New checkpoints of a rehearsed program, in the rehearsal's folder; `kept_files` is about older files."""

from __future__ import annotations

import builtins
import concurrent.futures
import contextlib
import functools
import hashlib
import importlib
import io
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
_SAVER, _LOADER = (f"torch.distributed.checkpoint.state_dict_{name}" for name in ("saver", "loader"))
#: Modules after whose import `Redirection.patch_distributed` is called.
MODULES = (_SAVER, _LOADER)
_lstat, _rename = os.lstat, os.rename  # the original functions
#: Bytes of tensors from which a checkpoint is not written at all.
_TOO_LARGE = 1 << 30


class Redirection:
    """Redirection of new checkpoints into a folder; reads find them there.

    A file's place follows from its path, so that other processes of the program find it.
    """

    def __init__(self, folder: Path, redirected: list[str]) -> None:
        """Create the redirection without patches.

        Args:
            folder: the folder, created on first use.
            redirected: list that receives the program's path of each file.
        """
        self._folder, self._redirected = folder, redirected
        self._places: dict[str, Path] = {}  # of redirected files, by absolute path as the program names them
        self._replaced: list[tuple[Any, str, Any]] = []
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

    def known(self, path: Any, *, follow: bool = True) -> Any:
        """Return the redirected path of a file, or the path itself.

        Args:
            path: the path, or something else, which is returned.
            follow: whether to follow a symbolic link to a redirected file.
        """
        if not isinstance(path, (str, os.PathLike)):
            return path
        name = os.path.abspath(os.fspath(path))  # noqa: PTH100
        if place := self._places.get(name) or self._place_of_others(name):
            return place
        if follow:
            with contextlib.suppress(OSError, RecursionError):
                target = os.path.join(os.path.dirname(name), os.readlink(name))  # noqa: PTH115, PTH118, PTH120
                return path if (found := self.known(target)) is target else found
        return path

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

    def matters(self, path: Path, _mode: str) -> bool:
        """Return true if opening this file in this mode must be redirected."""
        return path.suffix in _SUFFIXES and self._is_redirected(path)

    def _is_redirected(self, path: Any) -> bool:
        """Return true for a file that has a place, or does not exist."""
        return self.known(path) is not path or not os.path.lexists(path)

    def _saved(self, path: Any) -> Any:
        """Return the place of a new checkpoint; an older file's path, which is not written to either."""
        if self._is_redirected(path):
            return self.moved(path)
        if (name := os.fspath(path)) not in self._redirected:
            self._redirected.append(name)
        return path

    def patch_torch(self) -> None:
        """Patch the functions by which PyTorch and safetensors write and read checkpoints."""
        import torch

        torch.save = _with_path(torch.save, 1, "f", self._saved, skip="obj")
        torch.load = _with_path(torch.load, 0, "f", self.known)
        # Written by system calls without the C library: older files, too, are redirected here. Modules of
        # frameworks import these functions, and so come later.
        try:
            module: Any = importlib.import_module("safetensors")
        except ImportError:
            return
        module.serialize_file = _with_path(module.serialize_file, 1, "filename", self.moved)
        module.safe_open = _with_path(module.safe_open, 0, "filename", self.known)
        module = importlib.import_module("safetensors.torch")
        module.save_file = _with_path(module.save_file, 1, "filename", self.moved, skip="tensors")

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
        for name in ("stat", "access", "chmod", "utime", "truncate"):
            self._patch(os, name, self._knowing(getattr(os, name)))
        for name in ("lstat", "remove", "unlink"):
            self._patch(os, name, self._knowing(getattr(os, name), follow=False))
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

    def _knowing(self, function: Any, *, follow: bool = True) -> Any:
        @functools.wraps(function)
        def call(path: Any, *args: Any, **options: Any) -> Any:
            follows = follow and options.get("follow_symlinks", True)
            known = path if options.get("dir_fd") is not None else self.known(path, follow=follows)
            return function(known, *args, **options)

        return call

    def _renaming(self, function: Any) -> Any:
        """Redirect also a file that gets the name of a checkpoint."""
        move = shutil.move if function in (os.replace, os.rename) else function  # may go to another disk

        @functools.wraps(function)
        def call(source: Any, target: Any, *args: Any, **options: Any) -> Any:
            place = self.known(source, follow=False)
            if place is source and os.path.isdir(source) and not options:  # noqa: PTH112
                result = function(source, target, *args)
                self._rename_folder(os.path.abspath(source), os.path.abspath(target))  # noqa: PTH100
                return result
            if place is source:
                path = isinstance(target, (str, os.PathLike)) and not options and os.path.isfile(source)  # noqa: PTH113
                kept = self.moved(target) if path and self.matters(Path(target), "w") else target
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

    def _rename_folder(self, before: str, after: str) -> None:
        """Give the redirected files of a folder that has another name the places of their new paths."""
        for name in [name for name in self._places if name.startswith(before + os.sep)]:
            new = after + name[len(before) :]
            place, self._places[new] = self._places.pop(name), self._place(new)
            with contextlib.suppress(FileNotFoundError):
                _rename(place, self._places[new])


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

"""Checkpoints of a rehearsed program: written into a folder of the rehearsal."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: Bytes of tensors from which a checkpoint is left out altogether.
_TOO_LARGE = 1 << 30


def redirect(folder: Path, redirected: list[str]) -> None:
    """Write what ``torch.save`` and safetensors write into a folder; ``torch.load`` finds it there.

    Args:
        folder: the folder, made on first use.
        redirected: list that gets the path of each file as the program named it.
    """
    import torch

    places: dict[str, Path] = {}

    def moved(path: Any) -> Any:
        name = os.path.abspath(os.fspath(path))  # noqa: PTH100
        if name not in places:
            folder.mkdir(exist_ok=True)
            places[name] = folder / f"{len(places)}-{Path(name).name}"
            redirected.append(os.fspath(path))
        return places[name]

    def known(path: Any) -> Any:
        if isinstance(path, (str, os.PathLike)):
            return places.get(os.path.abspath(os.fspath(path)), path)  # noqa: PTH100
        return path

    def rename(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(source: Any, target: Any, *args: Any, **options: Any) -> Any:
            if (place := known(source)) is source:
                return function(source, target, *args, **options)
            places[os.path.abspath(os.fspath(target))] = place  # noqa: PTH100
            return target

        return call

    # A checkpoint under a temporary name gets its own name later, or is copied.
    os.replace, os.rename = rename(os.replace), rename(os.rename)
    shutil.move, shutil.copy = rename(shutil.move), rename(shutil.copy)
    shutil.copyfile = rename(shutil.copyfile)
    torch.save = _with_path(torch.save, 1, "f", moved, skip=lambda args: _bytes(args[:1]) > _TOO_LARGE)
    torch.load = _with_path(torch.load, 0, "f", known)
    try:
        import safetensors.torch as safetensors
    except ImportError:
        return
    too_large = lambda args: _bytes(args[:1]) > _TOO_LARGE  # noqa: E731
    safetensors.save_file = _with_path(safetensors.save_file, 1, "filename", moved, skip=too_large)
    safetensors.load_file = _with_path(safetensors.load_file, 0, "filename", known)


def _with_path(
    function: Callable[..., Any],
    position: int,
    name: str,
    move: Callable[[Any], Any],
    *,
    skip: Callable[[tuple[Any, ...]], bool] | None = None,
) -> Callable[..., Any]:
    """Return a function with the path among its arguments moved."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        path = args[position] if len(args) > position else options.get(name)
        if not isinstance(path, (str, os.PathLike)):
            return function(*args, **options)
        path = move(path)
        if skip is not None and skip(args):
            return None
        if len(args) > position:
            return function(*args[:position], path, *args[position + 1 :], **options)
        return function(*args, **options | {name: path})

    return call


def _bytes(value: Any) -> int:
    """Return the bytes of all tensors in nested containers."""
    import torch
    from torch.utils._pytree import tree_leaves

    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))

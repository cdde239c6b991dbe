"""Checkpoints that a rehearsal does not write, large and distributed ones; `kept_files` is about others."""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import os
import sys
from typing import Any

_SAVER, _LOADER = (f"torch.distributed.checkpoint.state_dict_{name}" for name in ("saver", "loader"))
#: Modules after whose import `adjust` patches them.
MODULES = ("torch", "safetensors", "safetensors.torch", _SAVER, _LOADER)
#: Bytes of tensors from which a checkpoint is not written: its file is empty.
_TOO_LARGE = 1 << 30


def adjust(name: str, written: list[str]) -> None:
    """Patch an imported module; `written` receives the names of distributed checkpoints."""
    module: Any = sys.modules[name]
    if name == "torch":
        module.save = _without_large(module.save)
    elif name == "safetensors":
        # It writes files by system calls without the C library.
        module.serialize_file = functools.partial(_write, module.serialize)
    elif name == "safetensors.torch":
        module.save_file = _without_large(module.save_file)
    elif name == _SAVER:
        done = concurrent.futures.Future[None]()
        done.set_result(None)
        module.save = _without_distributed(module.save, None, written)
        module.async_save = _without_distributed(module.async_save, done, written)
    else:
        module.load = _without_distributed(module.load, None, written)


def _without_large(save: Any) -> Any:
    """Wrap a function that saves tensors to a path to leave the file of too many tensors empty."""
    signature = inspect.signature(save)

    @functools.wraps(save)
    def call(*args: Any, **options: Any) -> None:
        tensors, path, *_ = signature.bind(*args, **options).arguments.values()
        named = isinstance(path, (str, os.PathLike))
        new = named and not os.path.lexists(path)
        if named and _bytes(tensors) > _TOO_LARGE:
            open(path, "wb").close()  # noqa: PTH123
        else:
            save(*args, **options)
        if new:  # a name without a checkpoint's suffix becomes a checkpoint's, too
            checkpoint = f"{os.fspath(path)}-{os.getpid()}.pt"
            os.rename(path, checkpoint)  # noqa: PTH104
            os.rename(checkpoint, path)  # noqa: PTH104

    return call


def _write(serialize: Any, tensors: Any, filename: Any, metadata: Any = None) -> None:
    with open(filename, "wb") as file:  # noqa: PTH123
        file.write(serialize(tensors, metadata))


def _without_distributed(function: Any, result: Any, written: list[str]) -> Any:
    """Wrap a function to save no distributed checkpoint, and to load none that was not saved."""
    saves = "load" not in function.__name__

    @functools.wraps(function)
    def call(*args: Any, checkpoint_id: Any = None, **options: Any) -> Any:
        storage = options.get("storage_writer", options.get("storage_reader"))
        name = os.fspath(getattr(storage, "path", "") if checkpoint_id is None else checkpoint_id)
        if not saves and name not in written:
            return function(*args, checkpoint_id=checkpoint_id, **options)
        if name not in written:
            written.append(name)
        return result

    return call


def _bytes(value: Any) -> int:
    """Return the bytes of all tensors in nested containers."""
    import torch
    from torch.utils._pytree import tree_leaves

    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    return sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))

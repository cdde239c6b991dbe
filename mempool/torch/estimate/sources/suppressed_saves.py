"""Suppression of functions that write tensors to files, since fake tensors have no values."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: Savers by module; NumPy's are skipped only for calls with tensors, and may write real arrays.
_SAVERS = {
    "torch": ("save",),
    "torch.serialization": ("save",),
    "torch.jit": ("save",),
    "safetensors.torch": ("save_file", "save_model"),
    "numpy": ("save", "savez", "savez_compressed", "savetxt"),
}


@contextlib.contextmanager
def unsaved(told: Callable[[str], object]) -> Iterator[None]:
    """Leave files alone in the block: most savers open, and so empty, a file before reading the tensor.

    Args:
        told: called with the name of each saver that is skipped.
    """
    with contextlib.ExitStack() as stack:
        for where, names in _SAVERS.items():
            if importlib.util.find_spec(where.partition(".")[0]) is None:
                continue
            module = importlib.import_module(where)
            for name in names:
                before = getattr(module, name)
                stack.callback(setattr, module, name, before)
                setattr(module, name, _instead(before, f"{where}.{name}", told))
        yield


def _instead(save: Callable[..., Any], name: str, told: Callable[[str], object]) -> Callable[..., Any]:
    real = name.startswith("numpy.")

    @functools.wraps(save)
    def passed_over(*args: Any, **kwargs: Any) -> Any:
        if real and not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return save(*args, **kwargs)
        told(name)
        return None

    return passed_over

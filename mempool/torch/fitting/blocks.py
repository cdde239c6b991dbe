"""Activation checkpointing of a model's repeated blocks."""

from __future__ import annotations

import fnmatch
import functools
from typing import TYPE_CHECKING

from torch import nn
from torch.utils.checkpoint import checkpoint

from mempool.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator


def checkpointed(model: nn.Module, which: bool | str) -> None:  # noqa: FBT001 - as a job has it
    """Make modules compute their activations again in the backward.

    Args:
        model: changed in place.
        which: True for the repeated blocks; else a pattern of names of modules, as ``fnmatch`` has it.

    Raises:
        UsageError: there are none.
    """
    names = dict(model.named_modules())
    found = (
        list(repeated_blocks(model))
        if which is True
        else [name for name in names if fnmatch.fnmatchcase(name, str(which))]
    )
    if not found:
        what = "the model has no repeated blocks" if which is True else f"no module is called {which!r}"
        raise UsageError(f"nothing to checkpoint: {what}")
    for name in found:
        block = names[name]
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def repeated_blocks(model: nn.Module) -> Iterator[str]:
    """Names of the blocks that a deep model repeats: two or more of a class in one list, outermost first.

    Blocks that hold most of the parameters of a list or sequence whose items are of one class; what lies
    inside of them is not looked at.
    """
    inside: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if (path.startswith(inside) and inside) or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        children = list(module.named_children())
        classes = {type(child) for _, child in children}
        if len(children) < 2 or len(classes) > 1 or not any(True for _ in children[0][1].children()):
            continue
        for name, _ in children:
            full = f"{path}.{name}" if path else name
            inside += (f"{full}.",)
            yield full

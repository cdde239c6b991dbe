"""Activation checkpointing (recompute): repeated blocks of a model, and the operations that run twice."""

from __future__ import annotations

import fnmatch
import functools
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mempool.errors import UsageError

#: Modules that only contain other modules and are never called.
_LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class BlockSelection:
    """A selection of blocks to checkpoint.

    Attributes:
        blocks: names of the modules that recompute their activations, in the order of the model.
        whole: names of the modules all of whose children are in ``blocks``.
        owner: name of the module with a built-in checkpointing switch, as models of transformers have; None
            if blocks are wrapped one by one.
        switch: name of the switch, a method.
    """

    blocks: tuple[str, ...]
    whole: frozenset[str] = frozenset()
    owner: str | None = None
    switch: str = ""


def checkpointed(model: nn.Module, which: bool | str) -> None:  # noqa: FBT001 - the type of `Job.checkpoint`
    """Make modules recompute their activations in the backward.

    Args:
        model: changed in place.
        which: True for the first of the model's `ways`; else a pattern of module names, as in ``fnmatch``.

    Raises:
        UsageError: no module matches.
    """
    if isinstance(which, str):
        names = tuple(name for name, _ in model.named_modules() if fnmatch.fnmatchcase(name, which))
        found = [BlockSelection(names)] if names else []
    else:
        found = block_selections(model)
    if not found:
        reason = (
            f"no module is called {which!r}" if isinstance(which, str) else "the model has no repeated blocks"
        )
        raise UsageError(f"nothing to checkpoint: {reason}")
    checkpoint_first(model, found[0])


def block_selections(model: nn.Module) -> list[BlockSelection]:
    """Return selections to checkpoint: the model's own switch, or else repeated blocks, coarse and fine."""
    if own := _own_switch(model):
        return [own]
    coarse = repeated_blocks(model)
    fine = [inner for name in coarse for inner in repeated_blocks(model.get_submodule(name), name) or [name]]
    return [_shortcut_of(model, names) for names in dict.fromkeys(map(tuple, (coarse, fine))) if names]


def _shortcut_of(
    model: nn.Module, names: tuple[str, ...], owner: str | None = None, switch: str = ""
) -> BlockSelection:
    parents = {name.rpartition(".")[0] for name in names}
    blocks = set(names)
    whole = frozenset(
        parent
        for parent in parents
        if isinstance(of := model.get_submodule(parent), (nn.ModuleList, nn.Sequential))
        and all(f"{parent}.{child}" in blocks for child, _ in of.named_children())
    )
    return BlockSelection(names, whole, owner, switch)


def repeated_blocks(module: nn.Module, path: str = "") -> list[str]:
    """Return the names of repeated blocks: outermost children of one parent and class, no leaves.

    Args:
        module: searched recursively.
        path: name of the module.
    """
    children = dict(module.named_children())
    count = Counter(type(child) for child in children.values() if any(True for _ in child.children()))
    found = []
    for name, child in children.items():
        full = f"{path}.{name}" if path else name
        if count[type(child)] > 1 and not isinstance(child, _LISTS):
            found.append(full)
        else:
            found += repeated_blocks(child, full)
    return found


def _own_switch(model: nn.Module) -> BlockSelection | None:
    for name, module in model.named_modules():
        if not getattr(module, "supports_gradient_checkpointing", False):
            continue
        for switch in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
            if hasattr(module, switch):
                layers = tuple(f"{name}.{layer}" if name else layer for layer in _layers(module))
                return _shortcut_of(model, layers, name, switch)
    return None


def _layers(module: nn.Module) -> list[str]:
    """Return the names of the layers that a model of transformers checkpoints by itself."""
    known = sys.modules.get("transformers.modeling_layers")
    layer = getattr(known, "GradientCheckpointingLayer", None)
    return [
        name for name, module_ in module.named_modules() if layer is not None and isinstance(module_, layer)
    ]


def checkpoint_first(
    model: nn.Module, way: BlockSelection, count: int | None = None, **options: Any
) -> nn.Module:
    """Make the first blocks recompute their activations in the backward.

    The first ones, since their saved tensors live longest.

    Args:
        model: changed in place, and returned.
        way: one of `ways` of such a model.
        count: number of blocks; None: all.
        options: for `torch.utils.checkpoint.checkpoint`.
    """
    if way.owner is not None:
        enable = getattr(model.get_submodule(way.owner), way.switch)
        enable(**{way.switch.replace("enable", "kwargs"): {"use_reentrant": False, **options}})
        for name in way.blocks[count:] if count is not None else ():
            model.get_submodule(name).gradient_checkpointing = False
        return model
    for name in way.blocks[:count]:
        block = model.get_submodule(name)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)
    return model


def checkpoint_code(way: BlockSelection, count: int | None = None) -> str:
    """Return the lines that do the work of `checkpoint_first` in the user's program."""
    every = count is None or count >= len(way.blocks)
    if way.owner is not None:
        line = f"{_expression('model', way.owner)}.{way.switch}()"
        blocks = "" if every else block_list(way)
        off = "layer.gradient_checkpointing = False"
        return line if every else f"{line}\nfor layer in [{blocks}][{count}:]: {off}"
    wrapped = "functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)"
    some = "" if every else f"[:{count}]"
    return f"for block in [{block_list(way)}]{some}: block.forward = {wrapped}"


def block_list(way: BlockSelection) -> str:
    """Format blocks as items of a Python list: a complete module list with a star, others by name."""
    parents = ((name.rpartition(".")[0], name) for name in way.blocks)
    items = (
        f"*{_expression('model', p)}" if p in way.whole else _expression("model", name) for p, name in parents
    )
    return ", ".join(dict.fromkeys(items))


def _expression(root: str, path: str) -> str:
    """Format a module as an expression: ``model.encoder.layers[2].mlp``."""
    return root + "".join(
        f"[{part}]" if part.isdigit() else f".{part}" for part in filter(None, path.split("."))
    )


def recomputed_shares(
    model: nn.Module, way: BlockSelection, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[float] | None:
    """Return each block's share of the forward's floating-point operations, in the order of ``way.blocks``.

    Args:
        model: called once.
        way: one of the model's `ways`.
        args: arguments of the model.
        kwargs: likewise.

    Returns:
        Shares; None if no operation is counted, or no blocks are known.
    """
    with FlopCounterMode(display=False) as counter:
        model(*args, **kwargs)
    operations = {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    inside = [operations.get(f"{type(model).__name__}.{name}", 0) for name in way.blocks]
    total = counter.get_total_flops()
    return [count / total for count in inside] if inside and total else None

"""Activation checkpointing (recompute) of a model: its own switch, or its repeated blocks."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass

from torch import nn
from torch.utils.checkpoint import checkpoint

#: Modules that only contain modules, and are never called.
_LISTS = (nn.ModuleList, nn.ModuleDict)
#: Methods of transformers models, newest first, that switch checkpointing on.
_SWITCHES = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
_WRAPPED = "functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)"


@dataclass(frozen=True)
class Checkpointing:
    """Method of checkpointing a model.

    Attributes:
        blocks: names of the modules that recompute their activations; empty with a switch.
        switch: path of the model's own method that switches checkpointing on, such as that of transformers
            models; "" if blocks are wrapped.
    """

    blocks: tuple[str, ...] = ()
    switch: str = ""

    @classmethod
    def of(cls, model: nn.Module) -> Checkpointing | None:
        """Return a model's method of checkpointing; None without a switch and without repeated blocks."""
        for name, module in model.named_modules():
            if getattr(module, "supports_gradient_checkpointing", False):
                switch = next((each for each in _SWITCHES if hasattr(module, each)), "")
                if switch:
                    return cls(switch=f"{name}.{switch}".lstrip("."))
        blocks = repeated_blocks(model)
        return cls(tuple(blocks)) if blocks else None

    def apply(self, model: nn.Module, *, preserve_rng_state: bool = True) -> None:
        """Change the model in place to recompute activations in the backward pass.

        Args:
            model: the model.
            preserve_rng_state: whether saved states of the random number generator take memory, too.
        """
        options = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
        if self.switch:
            owner, _, method = self.switch.rpartition(".")
            getattr(model.get_submodule(owner), method)(**{method.replace("enable", "kwargs"): options})
        for name in self.blocks:
            block = model.get_submodule(name)
            block.forward = functools.partial(checkpoint, block.forward, **options)

    @property
    def code(self) -> str:
        """Return the lines of code for the user's program."""
        if self.switch:
            return f"model.{self.switch}()"
        blocks = f"map(model.get_submodule, {list(self.blocks)})"
        return f"for block in {blocks}: block.forward = {_WRAPPED}"


def repeated_blocks(module: nn.Module, path: str = "") -> list[str]:
    """Return the names of repeated blocks: outermost children of one parent and class, without leaves.

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

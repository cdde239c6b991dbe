"""Idle models, which a program holds without calling: an average of the weights, a copy of the best ones."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


def idle_models(known: Iterable[torch.Tensor]) -> list[tuple[str, int]]:
    """Return classes and bytes of live fake models with uncounted parameters, outermost modules only.

    Args:
        known: parameters and buffers that are counted elsewhere.
    """
    gc.collect()  # remove unused models, which a real run frees sooner or later
    mode, counted = active_fake_mode(), {id(tensor) for tensor in known}
    alive = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    inner = {id(child) for module in alive for child in module.children()}
    found = []
    for module in alive:
        if id(module) in inner:
            continue
        new = {
            id(tensor): tensor
            for tensor in (*module.parameters(), *module.buffers())
            if isinstance(tensor, FakeTensor) and tensor.fake_mode is mode and id(tensor) not in counted
        }
        if any(isinstance(tensor, nn.Parameter) for tensor in new.values()):
            counted |= set(new)
            found.append((type(module).__name__, sum(t.untyped_storage().nbytes() for t in new.values())))
    return found

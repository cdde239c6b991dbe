"""Offloading as PyTorch has it: hooks on what the backward needs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from torch import nn


def save_on_host(model: nn.Module) -> nn.Module:
    """Make the forward keep nothing for the backward on the device, as under ``save_on_cpu``.

    On tensors without memory: what is kept away has none, and what comes back is new, as there.

    Args:
        model: changed in place, and returned.
    """
    model.forward = functools.partial(_hooked, model.forward)
    return model


def _hooked(forward: Any, *args: Any, **kwargs: Any) -> Any:
    with saved_tensors_hooks(lambda t: (t.size(), t.dtype), lambda kept: torch.empty(kept[0], dtype=kept[1])):
        return forward(*args, **kwargs)

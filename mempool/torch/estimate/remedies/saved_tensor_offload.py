"""Offloading of saved tensors to the host with PyTorch's hooks."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

if TYPE_CHECKING:
    from torch import nn


def save_on_host(model: nn.Module) -> nn.Module:
    """Make the forward keep no saved tensors on the device, as ``save_on_cpu`` does.

    For fake tensors: a packed tensor holds no memory, and unpacking makes a new tensor, as with
    ``save_on_cpu``.

    Args:
        model: changed in place, and returned.
    """
    model.forward = functools.partial(_hooked, model.forward)
    return model


def _hooked(forward: Any, *args: Any, **kwargs: Any) -> Any:
    with saved_tensors_hooks(lambda t: (t.size(), t.dtype), lambda kept: torch.empty(kept[0], dtype=kept[1])):
        return forward(*args, **kwargs)

"""Of TorchScript's, which is made of files."""

from __future__ import annotations

from typing import Any

import torch


def _numbers(x: torch.Tensor):
    y: list[float] = x.tolist()
    return y


class _Module(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        y: list[float] = x.tolist()
        return y


def function() -> Any:
    """Reads numbers by an operation of its own."""
    return torch.jit.script(_numbers)


def module() -> Any:
    """Likewise."""
    return torch.jit.script(_Module())

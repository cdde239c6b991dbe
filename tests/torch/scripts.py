"""TorchScript functions, which need a source file."""

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
    """Return a function that reads numbers by an operation of its own."""
    return torch.jit.script(_numbers)


def module() -> Any:
    """Return a module that reads numbers by an operation of its own."""
    return torch.jit.script(_Module())

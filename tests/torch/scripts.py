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
    """Return a scripted function whose operation reads numbers of a tensor."""
    return torch.jit.script(_numbers)


def module() -> Any:
    """Return a scripted module whose operation reads numbers of a tensor."""
    return torch.jit.script(_Module())


def _branch(x: torch.Tensor, w: torch.Tensor, n: int):
    for _ in range(n):
        x = torch.tanh(x + w)
    return x


def _forked(xs: list[torch.Tensor], w: torch.Tensor):
    futures = [torch.jit.fork(_branch, x, w, 6) for x in xs]
    return [torch.jit.wait(one) for one in futures]


def _bump(x: torch.Tensor):
    x.add_(0.5)
    x.add_(0.5)
    return x


def _bumped(xs: list[torch.Tensor]):
    futures = [torch.jit.fork(_bump, x) for x in xs]
    return [torch.jit.wait(one) for one in futures]


def bumped() -> Any:
    """Return a function that adds 1 to tensors in threads of PyTorch."""
    return torch.jit.script(_bumped)


def branch() -> Any:
    """Return a function of six operations."""
    return torch.jit.script(_branch)


def forked() -> Any:
    """Return a function that runs branches in threads of PyTorch."""
    return torch.jit.script(_forked)

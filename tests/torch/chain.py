"""A small training loop with a chain of layers, for tests of limits."""

from __future__ import annotations

from typing import Any

import torch


class Net(torch.nn.Module):
    """A chain of layers with small parameters, so that activations are most of the memory."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: Any) -> Any:
        """Return the output for rows of 64 numbers."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Loop:
    """A training loop with a default number of rows per batch."""

    def __init__(self, layers: int = 8, size: int = 1024) -> None:
        torch.manual_seed(0)
        self.net = Net(layers)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 1e-2, momentum=0.9)
        self.random = torch.Generator().manual_seed(1)
        self._size = size

    def step(self, size: int = 0) -> float:
        """Run one step with a batch of ``size`` rows; return the loss."""
        batch = torch.randn(size or self._size, 64, generator=self.random)
        loss = self.net(batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

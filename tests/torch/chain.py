"""A small training of a chain of layers, for a limit to be set on."""

from __future__ import annotations

from typing import Any

import torch


class Net(torch.nn.Module):
    """A chain whose activations are all there is."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: Any) -> Any:
        """What comes out of so many rows of 64 numbers."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Loop:
    """Training that is told how large each batch is, or else takes so many rows."""

    def __init__(self, layers: int = 8, size: int = 1024) -> None:
        torch.manual_seed(0)
        self.net = Net(layers)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 1e-2, momentum=0.9)
        self.random = torch.Generator().manual_seed(1)
        self._size = size

    def step(self, size: int = 0) -> float:
        """One step; its loss."""
        batch = torch.randn(size or self._size, 64, generator=self.random)
        loss = self.net(batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

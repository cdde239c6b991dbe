"""A wrapper around an optimizer, like those of frameworks."""

from __future__ import annotations

from typing import Any

import torch


class OptimizerWrapper(torch.optim.Optimizer):
    """A wrapper like accelerate's, which skips PyTorch's constructor and makes every second step."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.calls = 0

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        if self.calls % 2 == 0:
            self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.calls % 2 == 0:
            self.optimizer.zero_grad(set_to_none=set_to_none)

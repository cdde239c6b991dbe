"""An optimizer around another, as frameworks hand them out."""

from __future__ import annotations

from typing import Any

import torch


class Around(torch.optim.Optimizer):
    """As accelerate's: it passes for PyTorch's, which never made it, and steps only every second time."""

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

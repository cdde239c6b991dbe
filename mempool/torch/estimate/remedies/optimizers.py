"""Optimizers with other settings, and one that steps in the backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mempool.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


def with_options(make: Make, **options: Any) -> Make:
    """Return the same optimizer with other group settings, such as ``fused=True``.

    The returned function raises UsageError if the optimizer lacks such a setting.
    """

    def made(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        if unknown := options.keys() - optimizer.defaults.keys():
            raise UsageError(f"{type(optimizer).__name__} has no {', '.join(sorted(unknown))}")
        for group in optimizer.param_groups:
            group.update(options)
        return optimizer

    return made


class InBackward(torch.optim.Optimizer):
    """Optimizer that steps each parameter as soon as the gradient exists, and frees the gradient at once.

    Follows PyTorch's tutorial on fusing the optimizer step into the backward pass, with one optimizer for
    each parameter; ``step`` has nothing left to do.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], make: Make) -> None:
        super().__init__(parameters, {})
        self._own: dict[torch.Tensor, torch.optim.Optimizer] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                own = self._own[parameter] = make([parameter])
                self.state.update(own.state)
                own.state = self.state  # share one state dictionary, so that callers find all state here
                group.update({key: value for key, value in own.param_groups[0].items() if key != "params"})
                parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: torch.Tensor) -> None:
        self._own[parameter].step()
        parameter.grad = None

    def step(self, closure: Any = None) -> None:
        """Do nothing: all parameters were stepped in the backward."""

"""Optimizers that hold less: as they are, or with the same memory where the real one is not at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from mempool.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


def with_options(make: Make, **options: Any) -> Make:
    """The same optimizer with other settings of its groups, such as ``fused=True``.

    The function that is returned raises UsageError where the optimizer has no such setting.
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
    """Steps each parameter as soon as its gradient is there, and lets the gradient go at once.

    As PyTorch's tutorial on fusing the optimizer step into the backward pass does, with one optimizer for
    each parameter; ``step`` has nothing left to do.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], make: Make) -> None:
        super().__init__(parameters, {})
        self._own: dict[torch.Tensor, torch.optim.Optimizer] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                own = self._own[parameter] = make([parameter])
                self.state.update(own.state)
                own.state = self.state  # one for all, so that it is found here
                group.update({key: value for key, value in own.param_groups[0].items() if key != "params"})
                parameter.register_post_accumulate_grad_hook(self._take)

    def _take(self, parameter: torch.Tensor) -> None:
        self._own[parameter].step()
        parameter.grad = None

    def step(self, closure: Any = None) -> None:
        """Nothing: all is done."""


class Adafactor(torch.optim.Adafactor):
    """PyTorch's, which asks for values where there may be none: each is then taken for one."""

    def step(self, closure: Any = None) -> Any:
        """As of the base."""
        with _Ones():
            return super().step(closure)


class _Ones(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and isinstance(args[0], FakeTensor):
            return 1.0
        return func(*args, **(kwargs or {}))


class MasterWeights(torch.optim.Optimizer):
    """Another optimizer on copies of the parameters in float32, copied back after each step.

    What DeepSpeed and Megatron do for models in bfloat16. A gradient is let go once it is copied.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], make: Make) -> None:
        super().__init__(parameters, {})
        self._pairs = [
            (parameter, parameter.detach().float().requires_grad_())
            for group in self.param_groups
            for parameter in group["params"]
        ]
        self._inner = make([copy for _, copy in self._pairs])
        for parameter, copy in self._pairs:
            self.state[parameter]["master"] = copy

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - as of the base
        """Step the copies, and copy them back."""
        for parameter, copy in self._pairs:
            if parameter.grad is not None:
                copy.grad, parameter.grad = parameter.grad.float(), None
        self._inner.step()
        for parameter, copy in self._pairs:
            copy.grad = None
            parameter.copy_(copy)
            self.state[parameter].update(self._inner.state[copy])

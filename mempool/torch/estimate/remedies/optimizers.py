"""Optimizers that hold less memory, and stand-ins with the same memory for real ones."""

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


class Adafactor(torch.optim.Adafactor):
    """PyTorch's Adafactor, which reads values; reading a fake tensor gives 1."""

    def step(self, closure: Any = None) -> Any:
        """Step as the base class does."""
        with _Ones():
            return super().step(closure)


class _Ones(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.item and isinstance(args[0], FakeTensor):
            return 1.0
        return func(*args, **(kwargs or {}))


class MasterWeights(torch.optim.Optimizer):
    """Another optimizer on float32 copies of the parameters, copied back after each step.

    DeepSpeed and Megatron do this for models in bfloat16. A gradient is freed once copied.
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
        """Step the copies, and copy them back to the parameters."""
        for parameter, copy in self._pairs:
            if parameter.grad is not None:
                copy.grad, parameter.grad = parameter.grad.float(), None
        self._inner.step()
        for parameter, copy in self._pairs:
            copy.grad = None
            parameter.copy_(copy)
            self.state[parameter].update(self._inner.state[copy])

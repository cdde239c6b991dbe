"""The joint graph of a training step, forward and backward, traced without memory by AOTAutograd."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_function
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback

from mempool.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import fx


@dataclass(frozen=True)
class Joint:
    """A step's forward and backward pass in one graph.

    Attributes:
        module: of ATen operations without mutation; placeholders are the parameters and buffers, the inputs
            (``primals_*``), then the gradients of what the forward pass returns (``tangents_*``).
        forward_outputs: how many of its outputs, the first ones, are the forward pass's.
        parameter_bytes: of the parameters, each once: as many are their gradients.
    """

    module: fx.GraphModule
    forward_outputs: int
    parameter_bytes: int


def joint_of(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Callable[[], tuple[Any, ...]] | tuple[Any, ...],
    loss: Callable[..., torch.Tensor] | None = None,
    *,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Joint:
    """Trace a step.

    Where model and inputs are functions, they are called with tensors that take no memory.

    Args:
        model: a module, or what makes one.
        inputs: its arguments, or what makes them.
        loss: of the model's result; where none is given, the result is the loss. Needs more than the result?
            Let the model compute it.
        decompositions: of operations into others, as of `aot_function`.

    Raises:
        UsageError: nothing in the step needs a gradient.
    """
    if isinstance(model, nn.Module):
        return _traced(model, inputs() if callable(inputs) else inputs, loss, decompositions)
    mode = None if callable(inputs) else detect_fake_mode(inputs)
    with mode or FakeTensorMode(allow_non_fake_inputs=True):
        return _traced(model(), inputs() if callable(inputs) else inputs, loss, decompositions)


def _traced(model: nn.Module, inputs: Any, loss: Any, decompositions: Any) -> Joint:
    named = dict(model.named_parameters(remove_duplicate=False))
    owned = {**named, **dict(model.named_buffers(remove_duplicate=False))}
    got: list[Joint] = []
    size = sum(one.nbytes for one in {id(one): one for one in named.values()}.values())

    def forward(given: Any, *args: Any) -> Any:
        result = torch.func.functional_call(model, given, args)
        return result if loss is None else loss(result)

    def keep(module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        got.append(Joint(module, num_fwd_outputs, size))
        raise _Kept

    traced = aot_function(
        forward,
        fw_compiler=lambda module, _: module,
        partition_fn=keep,
        num_params_buffers=len(owned),
        decompositions=None if decompositions is None else dict(decompositions),
    )
    with contextlib.suppress(_Kept), _named(model), torch.enable_grad():
        traced(owned, *inputs)
    if not got:
        raise UsageError("no joint graph: nothing in the step needs a gradient")
    return got[0]


class _Kept(BaseException):
    """The joint graph is there, and nothing else is wanted."""


@contextlib.contextmanager
def _named(model: nn.Module) -> Iterator[None]:
    """Each operation is told the path of the module it runs in."""
    paths = {module: path for path, module in model.named_modules()}
    stack: list[str] = []

    def tell() -> None:
        traceback.current_meta["nn_module_stack"] = {path: (path, nn.Module) for path in stack}

    def enter(module: nn.Module, _: Any) -> None:
        stack.append(paths[module])
        tell()

    def leave(_: nn.Module, __: Any, ___: Any) -> None:
        stack.pop()
        tell()

    hooks = [module.register_forward_pre_hook(enter) for module in paths]
    hooks += [module.register_forward_hook(leave, always_call=True) for module in paths]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        traceback.current_meta.pop("nn_module_stack", None)

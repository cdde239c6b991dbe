"""The joint graph of a step, traced by AOTAutograd without a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback

from mempool.errors import UsageError


@dataclass(frozen=True)
class JointGraph:
    """The forward and backward pass of a step in one graph.

    Attributes:
        module: a graph of ATen operations without mutation; placeholders are the parameters, buffers and
            inputs (``primals_*``), then the gradients of the forward results (``tangents_*``).
        forward_outputs: number of outputs of the forward pass, which come first.
        parameter_bytes: bytes of the distinct parameters, which equal the bytes of the gradients.
    """

    module: fx.GraphModule
    forward_outputs: int
    parameter_bytes: int


def trace_joint(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Callable[[], tuple[Any, ...]] | tuple[Any, ...],
    loss: Callable[..., torch.Tensor] | None = None,
) -> JointGraph:
    """Trace a step.

    If model and inputs are functions, they are called with fake tensors, which take no memory.

    Args:
        model: a module, or a function that makes one.
        inputs: the arguments of the module, or a function that makes them.
        loss: computes the loss from the model's result; None: the result is the loss. A loss that needs more
            than the result must be computed by the model.

    Raises:
        UsageError: nothing in the step needs a gradient.
    """
    if isinstance(model, nn.Module):
        return _traced(model, inputs() if callable(inputs) else inputs, loss)
    mode = None if callable(inputs) else detect_fake_mode(inputs)
    with mode or FakeTensorMode(allow_non_fake_inputs=True):
        return _traced(model(), inputs() if callable(inputs) else inputs, loss)


def _traced(model: nn.Module, inputs: Any, loss: Any) -> JointGraph:
    named = dict(model.named_parameters(remove_duplicate=False))
    owned = {**named, **dict(model.named_buffers(remove_duplicate=False))}
    got: list[JointGraph] = []
    size = sum(
        parameter.nbytes for parameter in {id(parameter): parameter for parameter in named.values()}.values()
    )

    def forward(given: Any, *args: Any) -> Any:
        result = torch.func.functional_call(model, given, args)
        return result if loss is None else loss(result)

    def keep(module: fx.GraphModule, _: Any, *, num_fwd_outputs: int, **__: Any) -> Any:
        got.append(JointGraph(module, num_fwd_outputs, size))
        raise _TracingDone

    traced = aot_function(
        forward,
        fw_compiler=lambda module, _: module,
        partition_fn=keep,
        num_params_buffers=len(owned),
    )
    with contextlib.suppress(_TracingDone), _named(model), torch.enable_grad():
        traced(owned, *inputs)
    if not got:
        raise UsageError("no joint graph: nothing in the step needs a gradient")
    return got[0]


class _TracingDone(BaseException):
    """Raised to stop tracing once the joint graph exists."""


@contextlib.contextmanager
def _named(model: nn.Module) -> Iterator[None]:
    """Attach to each traced operation the path of the module that runs the operation."""
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

"""Fake tensors of the CPU that take memory as those of another device would.

    with FakeTensorMode(), as_on("cuda", capability=(9, 0)):
        loss = model(x).sum()
        loss.backward()

A build of PyTorch without CUDA has fake tensors "on cuda" only up to the backward pass. On the CPU they do
all, but some functions take other buffers there. Inside the block these go the target's way:

* attention: `attention.py` chooses the kernel; dropout keeps a mask of bytes, not of the input's type
  (`ATen/native/Dropout.cpp`, `is_fused_kernel_acceptable`); recurrent layers are one cuDNN call
  (`recurrent.py`); softmax of float16 to float32 does not convert first (`ATen/native/SoftMax.cpp`);
* `torch.autocast("cuda")` is autocast, with CUDA's list of what runs in 32 bits (`precision.py`);
* optimizers and gradient clipping take their foreach forms, as they do for parameters on CUDA;
* "cuda" where a device is asked for is the fake device: `.to("cuda")` moves nothing;
* modules can be converted and moved, which fake tensors otherwise refuse (`modules_convert`).

Where CUDA takes the same buffers nothing is changed: batch norm (cuDNN's keeps mean and inverse deviation as
the native one does; its reserve is empty unless it is fused with an activation, which eager mode never asks
for), layer norm, cross entropy, embedding. What kernels allocate inside is in `margins.py`, but for
attention's backward pass, which is large and known.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from mempool.errors import UsageError
from mempool.torch.fitting import attention, precision, recurrent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes:
        capability: the compute capability: (8, 0) is an A100, (8, 9) an RTX 4090 or L4, (9, 0) an H100.
        cudnn: cuDNN's version, as `torch.backends.cudnn.version()` tells it.
    """

    capability: tuple[int, int] = (8, 0)
    cudnn: int = 91600

    @property
    def prefers_cudnn_attention(self) -> bool:
        """Whether cuDNN's attention comes first (`check_prefer_cudnn_attention`)."""
        return self.cudnn > 91500 and self.capability[0] in (9, 10)


@contextlib.contextmanager
def as_on(
    device: str = "cuda", *, capability: tuple[int, int] = (8, 0), cudnn: int = 91600
) -> Iterator[None]:
    """Let fake tensors of the CPU take the buffers that those of a device would.

    Real tensors are left alone. The optimizers' default and autocast's meaning of "cuda" are changed for the
    whole process while the block runs, the rest for its thread.

    Args:
        device: "cuda", or "cpu", where only modules are helped to be converted.
        capability: the compute capability, which decides between kernels of attention.
        cudnn: cuDNN's version, likewise.

    Raises:
        UsageError: of any other device.
    """
    kind = str(device).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"no device {device!r} to fit on: there are 'cuda' and 'cpu'")
    with contextlib.ExitStack() as stack:
        stack.enter_context(modules_convert())
        if kind == "cuda":
            stack.enter_context(foreach_by_default())
            stack.enter_context(precision.autocast_of_cuda())
            stack.enter_context(_backward_stays_in())
            stack.enter_context(_AsOn(Target(capability, cudnn)))
        yield


@contextlib.contextmanager
def modules_convert() -> Iterator[None]:
    """Let `Module.to`, `half`, `cuda` and their like convert fake parameters in place.

    PyTorch would swap them for new ones, which weak references to them forbid, and fake mode holds such.
    """
    before = nn.Module._apply

    def apply(module: Any, fn: Any, recurse: bool = True) -> Any:  # noqa: FBT001, FBT002 - PyTorch's own
        held = [*module._parameters.values(), *module._buffers.values()]
        if not any(isinstance(tensor, FakeTensor) for tensor in held):
            return before(module, fn, recurse)
        for child in module.children() if recurse else ():
            child._apply(fn)
        with torch.no_grad():
            for tensor in held:
                for part in (tensor, None if tensor is None else tensor.grad):
                    if part is not None:
                        part.data = fn(part)
        return module

    nn.Module._apply = apply
    try:
        yield
    finally:
        nn.Module._apply = before


@contextlib.contextmanager
def foreach_by_default() -> Iterator[None]:
    """Let optimizers and gradient clipping choose for fake tensors as they would for parameters on CUDA.

    They ask for the exact type and the kind of device (`torch.optim.optimizer._default_to_fused_or_foreach`,
    `torch.utils._foreach_utils._has_foreach_support`).
    """
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    lists = (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types)
    before = optimizer._get_foreach_kernels_supported_devices
    added = [known for known in lists if FakeTensor not in known]
    for known in added:
        known.append(FakeTensor)
    optimizer._get_foreach_kernels_supported_devices = lambda: [*before(), "cpu"]
    try:
        yield
    finally:
        optimizer._get_foreach_kernels_supported_devices = before
        for known in added:
            known.remove(FakeTensor)


class _AsOn(TorchFunctionMode):
    """Sends the calls that differ to their handlers."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self._target = target

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None and args and isinstance(args[0], FakeTensor):
            result = handler(self._target, func, args, kwargs)
            if result is not NotImplemented:
                return result
        if func is Tensor.backward:  # what checkpoints compute again in it goes the same way as before
            with self:
                return _backward(*args, **kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _here(kwargs["device"])}
        if func in precision.IN_32_BITS and torch.is_autocast_enabled("cpu"):
            args, kwargs = precision.widened(func, args, kwargs)
        return func(*args, **kwargs)


def _backward(tensor: Tensor, gradient: Any = None, *args: Any, inputs: Any = None, **kwargs: Any) -> None:
    torch.autograd.backward(tensor, gradient, *args, inputs=inputs, **kwargs)


@contextlib.contextmanager
def _backward_stays_in() -> Iterator[None]:
    """`torch.autograd.backward` and ``grad`` are not handed to modes, which would be off inside of them."""
    before = torch.autograd.has_torch_function
    torch.autograd.has_torch_function = lambda _: False
    try:
        yield
    finally:
        torch.autograd.has_torch_function = before


def _here(device: Any) -> Any:
    """The fake device, where the target is meant."""
    named = isinstance(device, (str, torch.device)) and str(device).partition(":")[0] == "cuda"
    return "cpu" if named or type(device) is int else device


def _attention(target: Target, func: Any, args: Any, kwargs: Any) -> Any:
    asked = attention.Asked(*args, **kwargs)
    if asked.query.is_nested:
        return func(*args, **kwargs)
    if torch.is_autocast_enabled("cpu"):
        asked = precision.narrowed(asked)
        with torch.autocast("cpu", enabled=False):
            return attention.attend(asked, target)
    return attention.attend(asked, target)


@dataclasses.dataclass(frozen=True)
class _Dropout:
    """The arguments of dropout, in `torch.nn.functional` and in `torch`."""

    input: Tensor
    p: float = 0.5
    training: bool = True
    inplace: bool = False
    train: bool = True


def _dropout(_: Target, _func: Any, args: Any, kwargs: Any) -> Any:
    given = _Dropout(*args, **kwargs)
    fused = given.training and given.train and 0 < given.p < 1 and not given.inplace and given.input.numel()
    return torch.native_dropout(given.input, given.p, train=True)[0] if fused else NotImplemented


def _softmax(_: Target, func: Any, args: Any, kwargs: Any) -> Any:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    wide = torch.float32 in (*args[2:], kwargs.get("dtype"))
    if dim is None or not wide or args[0].dtype != torch.float16:
        return NotImplemented
    op = torch.ops.aten._log_softmax if "log" in func.__name__ else torch.ops.aten._softmax
    return op(args[0], dim, half_to_float=True)


def _to(_: Target, func: Any, args: Any, kwargs: Any) -> Any:
    if "device" in kwargs:
        kwargs = {**kwargs, "device": _here(kwargs["device"])}
    return func(args[0], *(_here(a) for a in args[1:]), **kwargs)


def _cuda(_: Target, _func: Any, args: Any, _kwargs: Any) -> Any:
    return args[0]


def _recurrent(_: Target, func: Any, args: Any, _kwargs: Any) -> Any:
    return recurrent.layer(func.__name__, *args)


def _handlers() -> dict[Any, Callable[[Target, Any, Any, Any], Any]]:
    functional = torch.nn.functional
    soft = [
        getattr(place, name) for place in (functional, torch, Tensor) for name in ("softmax", "log_softmax")
    ]
    return {
        functional.scaled_dot_product_attention: _attention,
        functional.dropout: _dropout,
        torch.dropout: _dropout,
        Tensor.to: _to,
        Tensor.cuda: _cuda,
        **dict.fromkeys(soft, _softmax),
        **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
    }


_HANDLERS = _handlers()

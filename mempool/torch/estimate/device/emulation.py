"""Device emulation: fake tensors of the CPU with the buffers of tensors of another device.

    with FakeTensorMode(), emulate_device("cuda", capability=(9, 0)):
        loss = model(x).sum()
        loss.backward()

A build of PyTorch without CUDA does not support the backward pass of fake tensors "on cuda". Fake tensors on
the CPU support all functions, but some functions allocate other buffers than on CUDA. Inside the block these
functions allocate the target's buffers:

* attention takes a fused kernel; dropout keeps a mask of bytes, not of the input's type (`kernels.py`);
* `torch.autocast("cuda")` is autocast, with CUDA's list of operations that run in 32 bits (`autocast.py`);
* optimizers and gradient clipping use their foreach forms, as for parameters on CUDA;
* the device name "cuda" stands for the fake device: `.to("cuda")` moves nothing.

For both devices, `allow_fake_tensors` permits fake tensors in functions of PyTorch and transformers that
would fail or behave differently.

Functions with the same buffers on CUDA stay unchanged: batch norm (cuDNN also keeps mean and inverse
deviation; its reserve is empty unless fused with an activation, which eager mode never requests), layer norm,
cross entropy, embedding. `margins.py` has the memory that kernels allocate internally, except for attention's
backward pass, which is large and known. cuDNN's recurrent layers are not emulated: their estimate has a
caveat.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils

from mempool.torch.estimate.device import autocast, kernels
from mempool.torch.estimate.fake.copies import fake_of
from mempool.torch.estimate.fake.mode import finite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_MODULE = "transformers.masking_utils"
MASKED = (
    "the attention mask is taken to mask some tokens, and so needs the square of the length: less is needed "
    "where no token is padded"
)


@contextlib.contextmanager
def replaced(holder: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace an attribute while the block runs."""
    before = getattr(holder, name)
    setattr(holder, name, replacement)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextlib.contextmanager
def emulate_device(
    device: str = "cuda",
    *,
    capability: tuple[int, int] = (8, 0),
    warn: Callable[[str], object] = lambda _: None,
) -> Iterator[None]:
    """Make fake tensors of the CPU allocate the buffers of tensors on a device.

    The changes apply to the whole process while the block runs, but affect no real tensors except for
    autocast's types.

    Args:
        device: "cuda", or "cpu" for `allow_fake_tensors` alone.
        capability: the compute capability, which decides between kernels of attention.
        warn: called with sources of uncertainty.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(allow_fake_tensors(warn))
        if device == "cuda":
            stack.enter_context(_foreach_by_default())
            stack.enter_context(_autocast_of_cuda())
            stack.enter_context(kernels.override_kernels("AutocastCPU", autocast.cuda_autocast_kernels()))
            stack.enter_context(kernels.override_kernels("AutogradCPU", kernels.cuda_kernels(capability)))
            stack.enter_context(replaced(torch._C, "_InferenceMode", _no_grad))
            stack.enter_context(accept_cuda_names())
        yield


@contextlib.contextmanager
def allow_fake_tensors(warn: Callable[[str], object] = lambda _: None) -> Iterator[None]:
    """Permit creation, conversion and copies of modules with fake tensors while the block runs."""
    with (
        replaced(nn.Module, "_apply", _converting_in_place(nn.Module._apply)),
        replaced(FakeTensor, "__deepcopy__", _deep_copy),
        replaced(nn.init, "_no_grad_trunc_normal_", _drawing_once(nn.init._no_grad_trunc_normal_)),
        kernels.override_kernels("AutogradCPU", {"isfinite": kernels.for_fake_tensors("isfinite", finite)}),
        _patch_transformers_masks(warn),
    ):
        yield


@contextlib.contextmanager
def accept_cuda_names() -> Iterator[None]:
    """Make "cuda" the name of the fake tensors' device, so that `.to("cuda")` moves nothing.

    `torch.autograd.backward` and ``grad`` bypass modes, since a mode would be disabled inside of them.
    """
    with replaced(torch.autograd, "has_torch_function", lambda _: False), _CudaNames():
        yield


def _converting_in_place(before: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `Module._apply` with which `to`, `half` and `cuda` convert fake parameters in place.

    PyTorch would replace each parameter by a new one, which the weak references of fake mode forbid.
    """

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

    return apply


def _deep_copy(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    """Copy a fake tensor without reading its address, unlike PyTorch."""
    if type(tensor) is not FakeTensor:
        return Tensor.__deepcopy__(tensor, memo)
    if id(tensor) not in memo:
        known = tensor.constant is not None  # a count of batches, for example
        made = tensor.clone() if known else fake_of(tensor, memo.setdefault("mempool", {}), again=True)
        memo[id(tensor)] = made
        if tensor.grad is not None:
            made.grad = _deep_copy(tensor.grad, memo)
    found: Tensor = memo[id(tensor)]
    return found


def _no_grad(on: bool) -> contextlib.AbstractContextManager[Any]:  # noqa: FBT001 - PyTorch's own
    """Stand for `torch.inference_mode`, which skips the overridden autograd keys."""
    return torch.no_grad() if on else contextlib.nullcontext()


@contextlib.contextmanager
def _foreach_by_default() -> Iterator[None]:
    """Make optimizers and gradient clipping treat fake tensors as parameters on CUDA.

    Both check the exact type and the kind of device (`torch.optim.optimizer._default_to_fused_or_foreach`,
    `torch.utils._foreach_utils._has_foreach_support`).
    """
    types, devices = "_foreach_supported_types", optimizer._get_foreach_kernels_supported_devices
    with (
        replaced(optimizer, types, [*getattr(optimizer, types), FakeTensor]),
        replaced(_foreach_utils, types, [*getattr(_foreach_utils, types), FakeTensor]),
        replaced(optimizer, devices.__name__, lambda: [*devices(), "cpu"]),
    ):
        yield


@contextlib.contextmanager
def _patch_transformers_masks(warn: Callable[[str], object]) -> Iterator[None]:
    """Make transformers find no packed sequences, and warn of padding masks, while the block runs.

    The package, which may be imported inside the block, reads positions to detect packed sequences. For a
    fake tensor it would assume packed sequences: every layer would have a mask of the square of the length,
    and attention would use another kernel. It also reads padding masks to drop masks of ones; a fake mask is
    kept.

    Args:
        warn: called with `MASKED` when transformers would read a padding mask.
    """

    def noting(ignore: Callable[..., bool]) -> Callable[..., bool]:
        def can_ignore(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
            if padding_mask is not None:
                warn(MASKED)
            return ignore(padding_mask, *args, **kwargs)

        return can_ignore

    replacements: dict[str, Callable[[Any], Callable[..., Any]]] = {
        "find_packed_sequence_indices": lambda _: lambda position_ids: None,  # noqa: ARG005 - its name
        "_ignore_causal_mask_sdpa": noting,
        "_ignore_bidirectional_mask_sdpa": noting,
    }
    with contextlib.ExitStack() as stack:

        def at_first_call(*_: Any) -> None:
            hook.remove()
            module = sys.modules.get(_MODULE)
            for name, replacement in replacements.items():
                if (before := getattr(module, name, None)) is not None:
                    stack.enter_context(replaced(module, name, replacement(before)))

        hook = register_module_forward_pre_hook(at_first_call)
        stack.callback(hook.remove)
        yield


def _drawing_once(before: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a ``trunc_normal_`` that draws only once for fake tensors, which are never within bounds."""

    def draw(tensor: Tensor, mean: float, std: float, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            return before(tensor, mean, std, *args, **kwargs)
        with torch.no_grad():
            return tensor.normal_(mean, std)

    return draw


def _autocast_of_cuda() -> contextlib.AbstractContextManager[Any]:
    """Make `torch.autocast("cuda")` the autocast of fake tensors while the block runs.

    Without a GPU, CUDA's autocast switches itself off with a warning, and the run would have full precision.
    """
    context = torch.amp.autocast_mode.autocast
    before = context.__init__

    @functools.wraps(before)
    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        before(self, device_type, dtype, *args, **kwargs)

    return replaced(context, "__init__", init)


class _CudaNames(TorchFunctionMode):
    """Function mode that replaces the device "cuda" by the fake tensors' device, the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _INTERCEPTED:
            kwargs = kwargs or {}
            if func is Tensor.backward:  # so that recomputing checkpoints run inside the mode
                with self:
                    return _backward(*args, **kwargs)
            if func in (Tensor.cuda, Tensor.pin_memory) and isinstance(args[0], FakeTensor):
                return args[0]
            if func is Tensor.to:
                args = (args[0], *(_cpu_for_cuda(a) for a in args[1:]))
        if not kwargs:
            return func(*args)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _cpu_for_cuda(kwargs["device"])}
        return func(*args, **kwargs)


_INTERCEPTED = frozenset((Tensor.backward, Tensor.cuda, Tensor.pin_memory, Tensor.to))


def _backward(tensor: Tensor, gradient: Any = None, *args: Any, inputs: Any = None, **kwargs: Any) -> None:
    """Run a backward pass as ``Tensor.backward`` does, outside function modes."""
    torch.autograd.backward(tensor, gradient, *args, inputs=inputs, **kwargs)


def _cpu_for_cuda(device: Any) -> Any:
    named = isinstance(device, (str, torch.device)) and str(device).partition(":")[0] == "cuda"
    return "cpu" if named or type(device) is int else device

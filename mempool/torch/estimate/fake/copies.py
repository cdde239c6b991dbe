"""Fake copies of real tensors and models, and marks on fake tensors that hold ones everywhere.

transformers drops an attention mask of ones, and attention then takes a kernel without a mask. A mask from
``torch.ones``, or a real tensor of ones, is marked; a conversion or view of a marked tensor is marked too; a
write unmarks.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from mempool.errors import UsageError
from mempool.torch.estimate.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


_aten = torch.ops.aten
_MAKERS = frozenset((_aten.ones.default, _aten.ones_like.default, _aten.new_ones.default))
#: Operations whose last positional argument is the value that fills the result.
_FILLERS = frozenset((_aten.full.default, _aten.full_like.default, _aten.new_full.default))
_KEEPERS = frozenset(
    (
        *(_aten._to_copy.default, _aten.clone.default, _aten.detach.default, _aten.alias.default),
        *(_aten.slice.Tensor, _aten.view.default, _aten.unsqueeze.default, _aten.expand.default),
        *(_aten.repeat.default, _aten.select.int),
    )
)
#: Operations whose result may be known to hold ones.
ONES_OPERATIONS = _MAKERS | _FILLERS | _KEEPERS


def mark(tensor: Tensor) -> None:
    """Record that a tensor holds ones everywhere, until the next write."""
    if not tensor.is_inference():
        tensor.ones_version = tensor._version


def holds_ones(tensor: Any) -> bool:
    """Return whether a tensor is known to hold ones everywhere."""
    version = getattr(tensor, "ones_version", None)
    return version is not None and bool(version == tensor._version)


def mark_result(operation: Any, args: tuple[Any, ...], result: Any) -> None:
    """Mark the result of an operation in `ONES_OPERATIONS` if it holds ones everywhere."""
    ones = holds_ones(args[0]) if operation in _KEEPERS else operation in _MAKERS or args[-1] == 1
    if ones and isinstance(result, torch.Tensor):
        mark(result)


def real_ones(tensor: Tensor) -> bool:
    """Return whether a real tensor of whole numbers or truths holds ones everywhere."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.device.type == "meta":
        return False
    with _disable_current_modes():
        return 0 < tensor.numel() <= OPTIONS.mask_elements and bool((tensor == 1).all())


def to_fake(given: Any) -> Any:
    """Replace real tensors in a structure by fake ones of the same sizes, strides and sharing."""
    bases: dict[int, torch.Tensor] = {}
    return pytree.tree_map_only(torch.Tensor, lambda t: fake_of(t, bases), given)


def fake_of(tensor: torch.Tensor, bases: dict[int, torch.Tensor], *, again: bool = False) -> torch.Tensor:
    """Return a fake tensor of the same kind, on the CPU.

    Args:
        tensor: a real tensor, or one on the meta device.
        bases: fake storages by the address of known real storages; views share a storage.
        again: whether to copy a tensor that is fake already.
    """
    if not again and isinstance(tensor, FakeTensor) and tensor.device.type == "cpu":
        return tensor
    if tensor.layout is not torch.strided:
        raise UsageError(f"a tensor with layout {tensor.layout}: only strided ones have a known size")
    storage = tensor.untyped_storage()
    base = bases.get(storage._cdata)
    if base is None:
        base = bases[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
    whole = base[: storage.nbytes() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
    made = whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    if holds_ones(tensor) or (not isinstance(tensor, FakeTensor) and real_ones(tensor)):
        mark(made)
    return made.requires_grad_(tensor.requires_grad)


EAGER = "the result is of the eager model, and a compiled one may need more or less"
#: Attributes of modules that hold hooks.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def fake_model(
    make: Callable[[], nn.Module],
    dtype: torch.dtype | None,
    warn: Callable[[str], object] = lambda _: None,
) -> nn.Module:
    """Return the model of ``make`` on tensors without memory; called inside a FakeTensorMode.

    ``warn`` is called with the parts that the copy of a real model shares with the original.

    Raises:
        UsageError: the result is no module, or cannot be copied.
    """
    model = make()
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}, not a torch.nn.Module or what makes one")
    model = unwrapped(model)
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise UsageError("a ScriptModule cannot be looked into: give the module that it was made of")
    if not all(isinstance(t, FakeTensor) and t.device.type == "cpu" for t in _held(model)):
        if hooked := _hooked(model):
            warn(
                f"hooks of {', '.join(hooked[:3])}{', ...' if hooked[3:] else ''} run too, as part of the "
                "model: what they keep outside of it are tensors without values"
            )
        model = _copied(model)
    for module in model.modules():
        module._compiled_call_impl = None  # of module.compile()
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = unwrapped(child)
    return model if dtype is None else model.to(dtype)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside torch.compile, DataParallel or DistributedDataParallel."""
    while True:
        if isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = cast("nn.Module", model._orig_mod)
        elif isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model


def is_compiled(model: nn.Module) -> bool:
    """Return whether `torch.compile` has compiled a model or a part of a model."""
    return any(
        isinstance(getattr(module, "_orig_mod", None), nn.Module)
        or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def _hooked(model: nn.Module) -> list[str]:
    """Return the names of modules with hooks outside PyTorch; hooks are functions, and not copied."""
    return [
        name or type(model).__name__
        for name, module in model.named_modules()
        for hooks in (getattr(module, kind, None) for kind in _HOOKS)
        if any(
            not f"{getattr(hook, '__module__', None) or type(hook).__module__}.".startswith("torch.")
            for hook in (hooks or {}).values()
        )
    ]


def _held(model: nn.Module) -> list[torch.Tensor]:
    return list(itertools.chain(model.parameters(), model.buffers()))


def _copied(model: nn.Module) -> nn.Module:
    """Copy modules with fake tensors. Attributes are copied, hooks and sharing kept."""
    if any(nn.parameter.is_lazy(tensor) for tensor in _held(model)):
        raise UsageError("the model has lazy modules without sizes: call it once with an input before")
    bases: dict[int, torch.Tensor] = {}
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in pytree.tree_leaves(list(vars(module).values())):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = fake_of(tensor, bases)
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:
        return _copied_in_parts(model, memo)


def _copied_in_parts(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy each attribute; share those that cannot be copied, such as locks, handles, streams."""
    parts = [(module, object.__new__(type(module))) for module in model.modules()]
    memo |= {id(module): made for module, made in parts}
    for module, made in parts:
        for name, value in vars(module).items():
            try:
                made.__dict__[name] = copy.deepcopy(value, memo)
            except Exception:
                made.__dict__[name] = value
    copied: nn.Module = memo[id(model)]
    return copied

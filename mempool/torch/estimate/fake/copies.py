"""Fake copies of real tensors and models."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from mempool.errors import UsageError
from mempool.torch.estimate.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable


def to_fake(given: Any) -> Any:
    """Replace real tensors in a structure by fake ones of the same sizes, strides and sharing."""
    bases: dict[int, torch.Tensor] = {}
    return pytree.tree_map_only(torch.Tensor, lambda t: fake_of(t, bases), given)


def fake_of(tensor: torch.Tensor, bases: dict[int, torch.Tensor], *, again: bool = False) -> torch.Tensor:
    """Return a fake tensor of the same kind, on the CPU.

    Args:
        tensor: a real tensor, or one on the meta device.
        bases: fake storages by the address of known real storages; views share a storage.
        again: whether to copy tensors that are fake already.
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
    return made.requires_grad_(tensor.requires_grad)


#: Types that a search excludes, since they refer to objects outside the searched one.
_OUTSIDE = (type, FunctionType, ModuleType, torch.Tensor)


def tensors_in(*roots: Any, outside: tuple[type, ...] = ()) -> list[torch.Tensor]:
    """Return the tensors in objects, their attributes and items, within `searched_objects`.

    Args:
        roots: objects to search.
        outside: further excluded types.
    """
    found, searched, frontier = dict[int, torch.Tensor](), set[int](), list(roots)
    while frontier and len(searched) < OPTIONS.searched_objects:
        found |= {id(item): item for item in frontier if isinstance(item, torch.Tensor)}
        new = {id(item): item for item in frontier if not isinstance(item, (*_OUTSIDE, *outside))}
        new = {key: item for key, item in new.items() if key not in searched and gc.is_tracked(item)}
        searched.update(new)
        frontier = gc.get_referents(*new.values())
    return list(found.values())


#: Models without memory that have run.
_TRIED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def fake_model(make: Callable[[], nn.Module], dtype: torch.dtype | None) -> nn.Module:
    """Return the model of ``make`` on tensors without memory; call this inside a FakeTensorMode.

    A real model is copied. So is a model that ``make`` returns repeatedly, since a run changes it. The copy
    shares, and runs, the model's hooks.

    Raises:
        UsageError: the result is no module, or cannot be copied.
    """
    model = make()
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}, not a torch.nn.Module or what makes one")
    model = unwrapped(model)
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise UsageError("a ScriptModule cannot be looked into: give the module that it was made of")
    real = not all(isinstance(tensor, FakeTensor) and tensor.device.type == "cpu" for tensor in _held(model))
    if real or model in _TRIED:
        model = _copied(model)
    _TRIED.add(model)
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
            if isinstance(tensor, torch.Tensor) and type(tensor) is not FakeTensor and id(tensor) not in memo:
                memo[id(tensor)] = fake_of(tensor, bases)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise UsageError(f"the model cannot be copied ({text}): give a function that makes it") from error

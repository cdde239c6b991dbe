"""Fake tensors that are known to hold ones everywhere, as an attention mask without padding does.

transformers drops such a mask, and attention then takes a kernel without a mask. A mask from ``torch.ones``,
or a real tensor of ones, is marked; a conversion or view of a marked tensor is marked too; a write unmarks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
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
TELLING = _MAKERS | _FILLERS | _KEEPERS
#: Largest real tensor that is searched, in elements.
_MOST_ELEMENTS = 1 << 24


def mark(tensor: Tensor) -> None:
    """Record that a tensor holds ones everywhere, until the next write."""
    if not tensor.is_inference():
        tensor.ones_version = tensor._version


def holds_ones(tensor: Any) -> bool:
    """Return whether a tensor is known to hold ones everywhere."""
    version = getattr(tensor, "ones_version", None)
    return version is not None and bool(version == tensor._version)


def mark_result(operation: Any, args: tuple[Any, ...], result: Any) -> None:
    """Mark the result of an operation in `TELLING` if it holds ones everywhere."""
    ones = holds_ones(args[0]) if operation in _KEEPERS else operation in _MAKERS or args[-1] == 1
    if ones and isinstance(result, torch.Tensor):
        mark(result)


def real_ones(tensor: Tensor) -> bool:
    """Return whether a real tensor of whole numbers or truths holds ones everywhere."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.device.type == "meta":
        return False
    with _disable_current_modes():
        return 0 < tensor.numel() <= _MOST_ELEMENTS and bool((tensor == 1).all())

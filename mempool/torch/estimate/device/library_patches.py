"""Patches of library functions that read values, for tensors without values.

The package transformers reads positions to know whether sequences are packed, and the padding mask to know
whether any token is masked. A fake tensor has no values: transformers then assumes packed and padded
sequences, every layer has a mask of the square of the length, and attention takes another kernel.

``trunc_normal_`` draws again until all values are within bounds, which would never end.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_pre_hook

from mempool.torch.estimate.fake.copies import holds_ones

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_MODULE = "transformers.masking_utils"


@contextlib.contextmanager
def patch_transformers_masks() -> Iterator[None]:
    """Let transformers find no packed sequences, and drop masks of ones, while the block runs.

    The package may be imported inside the block.
    """
    with contextlib.ExitStack() as stack:

        def patch() -> None:
            module = sys.modules.get(_MODULE)
            for name, replacement in _REPLACEMENTS.items():
                before = getattr(module, name, None)
                if before is not None and not hasattr(before, "of_mempool"):
                    setattr(module, name, replacement(before))
                    stack.callback(setattr, module, name, before)

        def at_first_call(*_: Any) -> None:
            handle.remove()
            patch()

        handle = register_module_forward_pre_hook(at_first_call)
        stack.callback(handle.remove)
        patch()
        yield


def _never_packed(_: Callable[..., Any]) -> Callable[..., Any]:
    def find_target(position_ids: Any) -> None:
        """Find no sequence that begins within another."""

    find_target.of_mempool = True  # type: ignore[attr-defined]
    return find_target


def _without_ones(ignore: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap a function that decides whether a mask can be dropped; a mask of ones counts as no mask."""

    def can_ignore(padding_mask: Any, *args: Any, **kwargs: Any) -> bool:
        return ignore(None if holds_ones(padding_mask) else padding_mask, *args, **kwargs)

    can_ignore.of_mempool = True  # type: ignore[attr-defined]
    return can_ignore


#: Functions of `_MODULE` by name, each with the factory of its replacement.
_REPLACEMENTS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "find_packed_sequence_indices": _never_packed,
    "_ignore_causal_mask_sdpa": _without_ones,
    "_ignore_bidirectional_mask_sdpa": _without_ones,
}


@contextlib.contextmanager
def patch_trunc_normal() -> Iterator[None]:
    """Let ``trunc_normal_`` fill fake tensors by one draw while the block runs; real tensors as usual."""
    before = nn.init._no_grad_trunc_normal_

    def draw(tensor: torch.Tensor, mean: float, std: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            drawn: torch.Tensor = before(tensor, mean, std, *args, **kwargs)
            return drawn
        with torch.no_grad():
            return tensor.normal_(mean, std)

    nn.init._no_grad_trunc_normal_ = draw
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = before

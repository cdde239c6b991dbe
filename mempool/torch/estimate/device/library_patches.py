"""Patches of library functions that read values, for tensors without values.

The package transformers reads positions to detect packed sequences. For a fake tensor it would assume packed
sequences: every layer would have a mask of the square of the length, and attention would use another kernel.
It also reads padding masks to drop masks of ones; a fake mask is kept, which needs more memory, with a
warning.

``trunc_normal_`` redraws until all values are within bounds, which would never end.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_pre_hook

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
def patch_transformers_masks(warn: Callable[[str], object]) -> Iterator[None]:
    """Make transformers find no packed sequences, and warn of padding masks, while the block runs.

    The package may be imported inside the block.

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


def drawing_once(before: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a ``trunc_normal_`` that draws only once for fake tensors."""

    def draw(tensor: torch.Tensor, mean: float, std: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor):
            return before(tensor, mean, std, *args, **kwargs)
        with torch.no_grad():
            return tensor.normal_(mean, std)

    return draw

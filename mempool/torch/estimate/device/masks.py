"""Attention masks of transformers for fake tensors, whose positions and padding have no values.

The package transformers reads positions to know whether sequences are packed, and the padding mask to know
whether any token is masked. A fake tensor has no values: transformers then assumes packed and padded
sequences, every layer has a mask of the square of the length, and attention takes another kernel.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import register_module_forward_pre_hook

from mempool.torch.estimate.fake.ones import holds_ones

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MODULE = "transformers.masking_utils"


@contextlib.contextmanager
def sequences_unpacked() -> Iterator[None]:
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
    def find(position_ids: Any) -> None:
        """Find no sequence that begins within another."""

    find.of_mempool = True  # type: ignore[attr-defined]
    return find


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
